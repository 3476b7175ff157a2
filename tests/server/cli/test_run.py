"""`penstock run` ends its server, also if a signal stops it while it starts that server."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from server.cli import run


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_the_server_is_being_started_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(popen(command))
        signal.raise_signal(number)  # before the caller has the process
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(SystemExit) as ended, run.served("demo"):
            pass
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
        is_running = started[0].poll() is None
        started[0].kill()
        started[0].wait()
    assert not is_running
    assert ended.value.code == 128 + number
