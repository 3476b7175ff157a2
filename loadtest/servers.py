"""Servers to measure, each in its own process on a port of the loopback address."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

START_S = 400  # vLLM compiles for 100 s on a busy machine, more for larger models
STOP_S = 30


def free_ports(count: int) -> list[int]:
    """Return distinct free ports. All are bound at the same time, so that none repeats."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in found]


class Server:
    """A server that starts at once; `with` waits until it is ready and stops it at the end.

    `--port` is appended to `command`. `ready` is the path that returns 200 once the model is
    loaded.
    """

    def __init__(self, command: Sequence[str], ready: str, port: int | None = None) -> None:
        self.port = port or free_ports(1)[0]
        self.address = f"127.0.0.1:{self.port}"
        self._command = [*command, "--port", str(self.port)]
        self._ready = f"http://{self.address}{ready}"
        # `stop` closes this file.
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.start()

    def start(self) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=self._log)

    def wait_ready(self) -> None:
        """Wait until the server is ready.

        Raises SystemExit with the end of its stderr if it exits or takes too long.
        """
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > self._began + START_S:
                self._log.seek(0)
                name = Path(self._command[0]).name
                raise SystemExit(f"{name} did not become ready:\n{self._log.read()[-2000:]}")
            time.sleep(0.05)
        self.start_seconds = time.monotonic() - self._began

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(self._ready, timeout=5).close()
            return True
        return False

    def stop(self) -> None:
        """End the server, and the processes it leaves behind."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._log.close()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Penstock(Server):
    def __init__(self, model: str | Path, flags: Sequence[str], port: int | None = None) -> None:
        command = [sys.executable, "-m", "server", "serve", str(model), "--log-level", "warning"]
        super().__init__([*command, *flags], "/ready", port)
