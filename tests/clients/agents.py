"""Run a coding agent with `penstock launch`, scripted answers and no other host."""

from __future__ import annotations

import os
import pty
import select
import signal
import socketserver
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import commands_of
from tests.support.process import ROOT
from tests.support.scripted_serve import serving_script

RUN_S = 300
KEY_VARIABLE, KEY = "PENSTOCK_API_KEY", "sk-agent"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
LAST_PROXIES = ("ALL_PROXY", "all_proxy")
HOSTS = "hosts.txt"
KEY_S = 6.0
# Questions to a terminal, and its answers: where the cursor is, and which terminal it is.
TERMINAL = {b"\x1b[6n": b"\x1b[1;1R", b"\x1b[c": b"\x1b[?62;22c"}
# The variables of the user's environment that a session of an agent gets.
KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "TMPDIR")
# Refuses what a client on Node connects to besides this machine: not all of them use a proxy.
NODE_HOOK = """
const { appendFileSync } = require("node:fs");
const { Socket } = require("node:net");
const connect = Socket.prototype.connect;
Socket.prototype.connect = function (...given) {
  const options = Array.isArray(given[0]) ? given[0][0] : given[0];
  const host = options?.host;
  if (!host || host === "127.0.0.1" || host === "localhost") return connect.apply(this, given);
  appendFileSync(process.env.AGENT_HOSTS, `${host}\\n`);
  Object.assign(options, { host: "127.0.0.1", port: 9 });  // no program listens there
  return connect.apply(this, given);
};
"""


class RefusingProxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy that refuses each request, and notes its host."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RefusedRequest)
        self.hosts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class RefusedRequest(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, RefusingProxy)
        target = self.rfile.readline().decode(errors="replace").split(" ")[1:2]
        self.server.hosts += target
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")


@contextmanager
def refusing_proxy() -> Iterator[RefusingProxy]:
    with RefusingProxy() as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


@dataclass(frozen=True)
class Session:
    """The end of a session, and what the client used besides the server and its own folder."""

    status: int
    stdout: str
    stderr: str
    hosts: tuple[str, ...]
    left_in_home: frozenset[str]  # the first part of each path
    server_log: str

    def __str__(self) -> str:
        ends = (self.stdout, self.stderr, self.server_log)
        return "\n".join([f"status {self.status}, hosts {self.hosts}", *ends])


def session(
    client: str,
    command: str,
    folder: Path,
    arguments: Sequence[str],
    turns: Sequence[str],
    plain: Sequence[str] = ("Done.",),
) -> Session:
    """Run the client in `folder / "project"`. The answers are those of a Script."""
    (folder / "home").mkdir()
    scripted = serving_script(folder, turns, plain, api_key=[KEY])
    with scripted as server, refusing_proxy() as proxy:
        launch = [sys.executable, "-m", "server", "launch", client, "--url", server.base_url]
        done = subprocess.run(
            [*launch, "--", *arguments],
            cwd=folder / "project",
            env=environment(command, folder, dict.fromkeys(PROXIES, proxy.url)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        log = server.log
    hosts = (*proxy.hosts, *(folder / HOSTS).read_text().split())
    left = left_in_home(folder / "home", client)
    return Session(done.returncode, done.stdout, done.stderr, hosts, left, log)


def environment(command: str, folder: Path, proxies: dict[str, str]) -> dict[str, str]:
    """Return the environment of a user who has the client, and these variables of proxies."""
    (folder / HOSTS).touch()
    (folder / "hook.cjs").write_text(NODE_HOOK)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {
        **kept,
        "PATH": f"{commands_of(command)}:{kept['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),  # the client runs in the folder of its project
        KEY_VARIABLE: KEY,
        **proxies,
        "NODE_OPTIONS": f"--require {folder / 'hook.cjs'}",
        "AGENT_HOSTS": str(folder / HOSTS),
    }


@dataclass(frozen=True)
class Screen:
    """The output of a client's screen, and the hosts that it wanted besides the server."""

    text: str
    hosts: tuple[str, ...]
    server_log: str


def screen(client: str, command: str, folder: Path, keys: Sequence[str]) -> Screen:
    """Start the client in a terminal, press keys some seconds apart, and end it."""
    (folder / "home").mkdir()
    with serving_script(folder, [], api_key=[KEY]) as server, refusing_proxy() as proxy:
        # Only the last resort of clients: `penstock launch` may set the others.
        env = environment(command, folder, dict.fromkeys(LAST_PROXIES, proxy.url))
        program = [sys.executable, "-m", "server", "launch", client, "--url", server.base_url]
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder / "project")
            os.execve(program[0], program, env | {"TERM": "xterm-256color"})
        termios.tcsetwinsize(terminal, (40, 120))
        try:
            text = b"".join(answered(terminal, key) for key in ("", *keys, ""))
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(terminal)
        log = server.log
    hosts = (*proxy.hosts, *(folder / HOSTS).read_text().split())
    return Screen(text.decode(errors="replace"), hosts, log)


def answered(terminal: int, key: str) -> bytes:
    """Press a key, and return what is written in the next seconds. Answer as a terminal does."""
    os.write(terminal, key.encode())
    text = b""
    deadline = time.monotonic() + KEY_S
    while time.monotonic() < deadline:
        readable, _, _ = select.select([terminal], [], [], 0.2)
        if not readable:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the client has ended
            break
        for question, answer in TERMINAL.items():
            if question in data:
                os.write(terminal, answer)
        text += data
    return text


def left_in_home(home: Path, client: str) -> frozenset[str]:
    """Return what lies in the home, but not in the client's own folder."""
    own = home / ".local/state/penstock/launch" / client
    files = [path for path in home.rglob("*") if not path.is_dir()]
    return frozenset(
        path.relative_to(home).parts[0] for path in files if not path.is_relative_to(own)
    )
