"""Drain with half-sent requests and kept connections, and signals to process 1 of a container.

test_death.py tests drains with queues, interrupted streams and second signals.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx2
import psutil
import pytest

from server import exit_codes
from tests.support.process import INTERRUPTIBLE, ROOT, eventually
from tests.support.serve import Server, serving

BODY = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 4}).encode()


def head(body: bytes) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


@contextlib.contextmanager
def half_sent(server: Server) -> Iterator[socket.socket]:
    """A connection with a request that the server has read in part."""
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head(BODY) + BODY[:10])
        time.sleep(0.3)  # no outside sign that the headers were read
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.slow
def test_request_half_sent_before_sigterm_is_answered() -> None:
    with serving("demo") as server, half_sent(server) as connection:
        server.signal(signal.SIGTERM)
        server.wait_for("finishing accepted requests")
        with httpx2.Client(base_url=server.base_url) as client:
            assert client.get("/ready").status_code == 503
            assert server.metric("draining") == 1
            connection.sendall(BODY[10:])
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close" in head.lower()
        assert json.loads(body)["usage"]["completion_tokens"] > 0
        assert server.status() == exit_codes.CLEAN


@pytest.mark.slow
def test_requests_after_sigterm_read_their_503_even_with_large_body() -> None:
    """Closing while the client still sends would reset the connection, and lose the 503."""
    with serving("demo") as server, half_sent(server):
        assert server.metric("draining") == 0
        server.signal(signal.SIGTERM)
        server.wait_for("finishing accepted requests")
        for size in (100, 7_000_000):
            body = json.dumps({"model": "demo", "prompt": "x" * size}).encode()
            with socket.create_connection(server.address, timeout=60) as late:
                late.sendall(head(body) + body)
                headers, _, answer = read_all(late).partition(b"\r\n\r\n")
            assert headers.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nconnection: close" in headers.lower()
            assert re.search(rb"\r\nretry-after: [1-9]", headers.lower())
            assert json.loads(answer)["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_incomplete_request_gets_503_at_drain_timeout() -> None:
    with serving("demo", "--drain-timeout", "1") as server, half_sent(server) as connection:
        server.signal(signal.SIGTERM)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "shutting_down"
        assert server.status() == exit_codes.CLEAN
        assert "Traceback" not in server.log


def test_pull_as_process_1_of_container_exits_on_sigterm() -> None:
    """Linux drops signals that process 1 does not handle; a pull would outlast its grace period."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to be process 1 of a namespace")
    silent = socket.create_server(("127.0.0.1", 0))  # a hub that never responds
    port = silent.getsockname()[1]
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    pull = [sys.executable, "-m", "server", "pull", "org/name"]
    hub = f"HF_ENDPOINT=http://127.0.0.1:{port}"
    with (
        silent,
        subprocess.Popen(
            [*INTERRUPTIBLE, hub, *unshare, *pull], cwd=ROOT, stderr=subprocess.PIPE
        ) as outer,
    ):
        try:
            readable = eventually(
                lambda: select.select([silent], [], [], 0)[0] or outer.poll() is not None,
                "the pull asks the hub",
                60,
            )
            if readable is True:
                pytest.skip(f"no process namespace here: {outer.communicate()[1].decode()}")
            [first] = psutil.Process(outer.pid).children()
            first.send_signal(signal.SIGTERM)
            eventually(lambda: outer.poll() is not None, "it has exited", 10)
        finally:
            outer.kill()
    assert outer.returncode == 128 + signal.SIGTERM
