"""Servers started and ended repeatedly: none leaves processes or files behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import web
from tests.support.serve import START_S, Server, eventually, starting

SECONDS = 60
SHARED_MEMORY = Path("/dev/shm")
# The signal that ends a server, and the stage at which it is sent.
ENDS = [
    (signal.SIGTERM, "ready"),
    (signal.SIGKILL, "ready"),
    (signal.SIGINT, "listening"),
    (signal.SIGTERM, "streaming"),
    (signal.SIGKILL, "streaming"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def living(temp: Path) -> list[psutil.Process]:
    """Return all running processes with this TMPDIR, including children of ended processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(temp) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue  # another user's process, or one that has just ended
    return found


@contextlib.contextmanager
def living_to(server: Server, stage: str) -> Iterator[None]:
    server.wait_for("listening on")
    if stage == "listening":
        eventually(lambda: server.children, "the engine process is there")
        yield
        return
    server.wait_ready()
    url, body = f"{server.base_url}/v1/completions", {"prompt": "Hello", "ignore_eos": True}
    if stage == "ready":
        assert web.post(url, json=body | {"max_tokens": 3}, timeout=START_S).status_code == 200
        yield
        return
    body |= {"max_tokens": 500, "stream": True}
    with web.stream("POST", url, json=body, timeout=START_S) as answer:
        next(answer.iter_lines())
        yield


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm and /proc")
def test_repeated_starts_and_ends_leave_no_process_and_no_file() -> None:
    """A minute of starts and ends, at several stages and with several signals."""
    port, before = free_port(), set(os.listdir(SHARED_MEMORY))
    deadline, cycles = time.monotonic() + SECONDS, 0
    while cycles < len(ENDS) or time.monotonic() < deadline:
        number, stage = ENDS[cycles % len(ENDS)]
        with starting("demo", "--port", port) as server:
            with living_to(server, stage):
                assert len(living(server.temp)) == 2, "the API process and the engine"
                server.signal(number)
                if number == signal.SIGKILL:
                    server.status()
            server.status()
            eventually(lambda temp=server.temp: not living(temp), "both processes are gone")
            assert [p.name for p in server.temp.iterdir()] == [], (number, stage)
        cycles += 1
    eventually(lambda: set(os.listdir(SHARED_MEMORY)) <= before, "/dev/shm is as it was")
