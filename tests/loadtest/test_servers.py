"""Servers that load tests start: ready when they say so, and gone at the end, whatever they do."""

from __future__ import annotations

import signal
import sys

import pytest

from loadtest import servers
from loadtest.servers import Server, free_ports

HTTP = "import http.server as h, sys; port = int(sys.argv[-1]); "
HTTP += "h.HTTPServer(('127.0.0.1', port), h.SimpleHTTPRequestHandler).serve_forever()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def python(code: str) -> Server:
    return Server([sys.executable, "-c", code], "/")


def test_it_is_there_within_the_with_and_gone_after_it() -> None:
    with python(HTTP) as server:
        assert server.start_seconds > 0
        assert server.process.poll() is None
    assert server.process.poll() == -signal.SIGTERM


def test_its_last_words_are_told_where_it_does_not_become_ready() -> None:
    with (
        pytest.raises(SystemExit, match="did not become ready:\nno such model"),
        python("import sys; sys.exit('no such model')"),
    ):
        pass


def test_one_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_S", 0.1)
    with python(DEAF + HTTP) as server:
        pass
    assert server.process.poll() == -signal.SIGKILL


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(20))) == 20
