"""Servers that load tests start: `with` waits until they are ready and always stops them."""

from __future__ import annotations

import signal
import sys

import psutil
import pytest

from loadtest import servers
from loadtest.servers import Server, free_ports

HTTP = "import http.server as h, sys; port = int(sys.argv[-1]); "
HTTP += "h.HTTPServer(('127.0.0.1', port), h.SimpleHTTPRequestHandler).serve_forever()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def python(code: str) -> Server:
    return Server([sys.executable, "-c", code], "/")


def test_server_runs_inside_with_and_is_stopped_after_it() -> None:
    with python(HTTP) as server:
        assert server.start_seconds > 0
        assert server.process.poll() is None
    assert server.process.poll() == -signal.SIGTERM


def test_server_that_does_not_start_raises_with_its_stderr() -> None:
    with (
        pytest.raises(SystemExit, match="did not become ready:\nno such model"),
        python("import sys; sys.exit('no such model')"),
    ):
        pass


def test_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_S", 0.1)
    with python(DEAF + HTTP) as server:
        pass
    assert server.process.poll() == -signal.SIGKILL


def test_processes_that_a_server_leaves_behind_are_ended() -> None:
    """vLLM's worker goes on when its parent is killed."""
    sleep = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    child = f"import subprocess; subprocess.Popen({sleep})"
    with python(HTTP.replace("; port", f"; {child}; port", 1)) as server:
        [left] = psutil.Process(server.process.pid).children()
    left.wait(30)  # raises if it is still there
    assert not left.is_running()


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20
