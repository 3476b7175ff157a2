"""Serving while other programs use the engine's CPU cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from engine.device.limits import cpu_count
from engine.device.openmp_wait import CHOICES
from tests.support.serve import Server, serving

STREAMS, TOKENS = 4, 200
SLEEPS = "they now sleep while they wait for each other"
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


@contextlib.contextmanager
def busy_program() -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


async def rate(server: Server, seconds: float) -> float:
    """Return the tokens per second of concurrent completions, repeated for `seconds`."""
    end, tokens = time.monotonic() + seconds, 0
    body = {"model": "demo", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}
    began = time.monotonic()
    async with server.http() as http:
        while time.monotonic() < end:
            asked = [http.post("/v1/completions", json=body) for _ in range(STREAMS)]
            for answer in await asyncio.gather(*asked):
                tokens += answer.json()["usage"]["completion_tokens"]
    return tokens / (time.monotonic() - began)


def others_seconds(server: Server) -> float:
    """Return the CPU seconds used so far by all processes except the server and this test."""
    machine = psutil.cpu_times()
    ours = [psutil.Process(server.process.pid), server.engine, psutil.Process()]
    own = sum(times.user + times.system for times in (process.cpu_times() for process in ours))
    return float(machine.user + machine.nice + machine.system - own)


@pytest.mark.slow
@pytest.mark.skipif(cores != 2 or cpu_count() != 2, reason="measured on two cores, on Linux")
async def test_engine_with_busy_program_sleeps_and_doubles_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With OpenMP's default waiting, a busy program cost 90 % of the speed or more."""
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    with serving("demo", "--threads", 2, env={"GOMP_SPINCOUNT": "300000"}) as server:
        with busy_program():
            stubborn = await rate(server, 8)
        assert SLEEPS not in server.log, "the user's own OpenMP setting is respected"
    with serving("demo", "--threads", 2) as server:
        with busy_program():
            await rate(server, 2)  # time for the engine to notice
            yielding = await rate(server, 8)
            assert SLEEPS in server.log
            assert server.metric("engine_cpu_contended") == 1
        began, others = time.monotonic(), others_seconds(server)
        for _ in range(40):  # a trial comes after 32 s, and its result after 30 more
            await rate(server, 2)
            if not server.metric("engine_cpu_contended"):
                break
        else:
            share = (others_seconds(server) - others) / (time.monotonic() - began)
            assert share > 0.25, "the engine did not notice that the program had ended"
            pytest.skip(f"other processes (tests?) used {share:.2f} cores throughout")
    assert yielding > 2 * stubborn
