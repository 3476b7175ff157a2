"""Run the commands of one page, and print what became of each as JSON lines.

    unshare --user --map-root-user --pid --fork --net --mount-proc \
        python -m tests.deploy.run_page PAGE RIG

The namespaces make the pages' ports free, and hide the servers of other users from `penstock ps`
and `penstock stop`. RIG is a JSON file with the fields of `Rig`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.deploy.documented import ROOT, Command, commands_of
from tests.deploy.documented_files import repositories
from tests.deploy.documented_rules import (
    INPUT,
    NEEDS_SERVER,
    WATCHES,
    Server,
    default_server,
    filled,
    reason_of,
    server_of,
)
from tests.support.hub import serving_hub

READY_S = 120
COMMAND_S = 900
STOP_S = 60
WATCH_S = 5
KERNELS = "home/.cache/penstock/kernels"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@dataclass(frozen=True)
class Rig:
    """Where the programs and files are."""

    bin: str  # of the environment with the wheel
    files: str  # has `work` and `home`
    clients: Mapping[str, str]  # the interpreter for programs that import a package
    node: str  # a folder with the Node package `openai`


class CommandError(Exception):
    """A command failed; the text is its output."""


class PageRun:
    """A page's working folder, home, and running servers."""

    def __init__(self, rig: Rig, folder: Path, hub: str) -> None:
        self.rig = rig
        self.work = folder / "work"
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        self.by_rule: Server | None = None  # the running server, if no block has started it
        self.log = folder / "log"
        self.environment = {
            "PATH": f"{rig.bin}:/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "HF_ENDPOINT": hub,
            "ADMIN_KEY": (self.work / "admins").read_text().strip(),
            "COLUMNS": "100",
        }

    def run(self, command: Command) -> None:
        """Raises CommandError."""
        text = filled(command)
        if server := server_of(text):
            self.start(server)
            self.by_rule = None
            return
        if NEEDS_SERVER.search(text):
            self.serve_for(command)
        if command.language == "python":
            self.finish([self.python_for(text), "-c", text])
        elif command.language == "js":
            script = self.work / "program.mjs"
            script.write_text(text)
            (self.work / "node_modules").unlink(missing_ok=True)
            (self.work / "node_modules").symlink_to(Path(self.rig.node) / "node_modules")
            self.finish(["node", str(script)])
        elif text.endswith("&"):
            self.others.append(self.background(text.removesuffix("&")))
        elif WATCHES.match(text):
            self.watch(text)
        else:
            self.finish(["bash", "-c", text])

    def serve_for(self, command: Command) -> None:
        """Start the server that the page's text says to start, unless a block has started one."""
        wanted = default_server(command)
        has_other = self.by_rule is not None and self.by_rule != wanted
        if has_other or not self.is_serving():
            self.start(wanted)
            self.by_rule = wanted

    def python_for(self, text: str) -> str:
        names = [name for name in self.rig.clients if f"import {name}" in text]
        names += [name for name in self.rig.clients if f"from {name}" in text]
        return self.rig.clients[names[0] if names else "openai"]

    def finish(self, arguments: list[str]) -> None:
        try:
            done = subprocess.run(
                arguments,
                cwd=self.work,
                env=self.environment,
                input=INPUT.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"not at its end after {COMMAND_S} s: {error.output}") from None
        output = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            raise CommandError(f"status {done.returncode}: {output[-2000:]}\n{self.log_end()}")

    def watch(self, text: str) -> None:
        """Run a command that a user ends by Ctrl-C."""
        process = self.background(text)
        time.sleep(WATCH_S)
        if process.poll() is not None:
            raise CommandError(f"ended with {process.returncode}: {self.log_end()}")
        process.send_signal(signal.SIGINT)
        if process.wait(STOP_S) not in (0, 130):
            raise CommandError(f"status {process.returncode} after Ctrl-C: {self.log_end()}")

    def start(self, server: Server) -> None:
        """Start a server, in place of one on its port, and wait until it is ready."""
        self.stop(server.port)
        process = self.background(server.command)
        self.servers[server.port] = process
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and process.poll() is None:
            if is_ready(server.port):
                return
            time.sleep(0.1)
        raise CommandError(f"{server.command} is not ready: {self.log_end()}")

    def background(self, text: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["env", "--default-signal=INT,HUP", "bash", "-c", f"exec {text.strip()}"],
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_serving(self) -> bool:
        return any(process.poll() is None for process in self.servers.values())

    def stop(self, port: int) -> None:
        process = self.servers.pop(port, None)
        if process is not None and process.poll() is None:
            process.terminate()
            if process.wait(STOP_S) != 0:
                raise CommandError(f"a server ended with {process.returncode}: {self.log_end()}")

    def close(self) -> None:
        for process in self.others:
            process.kill()
        for port in list(self.servers):
            self.stop(port)

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""


def is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def bring_up_loopback() -> None:
    """A new network namespace has a loopback interface that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh", b"lo", IFF_UP)
        fcntl.ioctl(control, SIOCSIFFLAGS, request.ljust(40, b"\0"))


@contextlib.contextmanager
def prepared(rig: Rig) -> Iterator[PageRun]:
    files = Path(rig.files)
    first, *more = repositories(files / "work")
    with tempfile.TemporaryDirectory(prefix="page-") as name, serving_hub(first, *more) as hub:
        folder = Path(name)
        shutil.copytree(files, folder, dirs_exist_ok=True)
        yield PageRun(rig, folder, hub.url)
        keep_kernels(folder / KERNELS, files / KERNELS)


def keep_kernels(made: Path, kept: Path) -> None:
    """Keep what the first page's server has compiled: it takes half a minute."""
    if made.is_dir() and not kept.exists():
        shutil.copytree(made, kept)


def outcomes(page: Path, rig: Rig) -> Iterator[dict[str, object]]:
    with prepared(rig) as run:
        for command in commands_of(page):
            began = time.monotonic()
            reason, failure = reason_of(command), ""
            if reason is None:
                try:
                    run.run(command)
                except CommandError as error:
                    failure = str(error)
            yield {
                "line": command.line,
                "text": command.text,
                "not_run": reason,
                "failure": failure,
                "seconds": round(time.monotonic() - began, 1),
            }
        run.close()


def main() -> None:
    page, rig = sys.argv[1:]
    os.environ.pop("PYTHONPATH", None)
    bring_up_loopback()
    for outcome in outcomes(ROOT / page, Rig(**json.loads(Path(rig).read_text()))):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
