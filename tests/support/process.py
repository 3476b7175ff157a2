"""A started server process whose progress is read from its stderr."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S = 90  # 3 s on an idle machine; most of it is the import of torch
STOP_S = 30


# Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP. Children inherit this.
INTERRUPTIBLE = ("env", "--default-signal=INT,HUP")


class Process:
    """A started subprocess; `log` is the text of its stderr so far."""

    def __init__(self, command: Sequence[str], stderr: Path, env: Mapping[str, str]) -> None:
        self._stderr = stderr
        with stderr.open("wb") as stream:
            command = [*INTERRUPTIBLE, *command]
            self.process = subprocess.Popen(command, stderr=stream, cwd=ROOT, env=env)

    @property
    def log(self) -> str:
        return self._stderr.read_text()

    @property
    def last_line(self) -> str:
        return self.log.splitlines()[-1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the first match on stderr. Fails the test if the process ends without one."""
        found = eventually(
            lambda: re.search(pattern, self.log) or self.process.poll() is not None,
            f"{pattern!r} on stderr",
            START_S,
        )
        if not isinstance(found, re.Match):
            pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log[-4000:]}")
        return found

    @property
    def base_url(self) -> str:
        return self.wait_for(r"listening on (http://\S+),")[1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self, timeout: float = STOP_S) -> int:
        return self.process.wait(timeout)


def eventually(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Poll `condition` and return its first true value. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value
