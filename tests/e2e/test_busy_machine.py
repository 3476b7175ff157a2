"""Serving beside programs that want the engine's cores, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from engine.platform import cpu_count
from tests.e2e.serve import Server, serving

STREAMS, TOKENS = 4, 200
SLEEPS = "Other programs want the engine's cores"
ALONE = "The engine has its cores to itself again"


@contextlib.contextmanager
def busy_program() -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


async def rate(server: Server, seconds: float) -> float:
    """Tokens a second of some streams that are asked for again and again."""
    end, tokens = time.monotonic() + seconds, 0
    body = {"model": "demo", "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}
    began = time.monotonic()
    async with server.http() as http:
        while time.monotonic() < end:
            asked = [http.post("/v1/completions", json=body) for _ in range(STREAMS)]
            for answer in await asyncio.gather(*asked):
                tokens += answer.json()["usage"]["completion_tokens"]
    return tokens / (time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or cpu_count() not in range(2, 9),
    reason="one busy program must matter: needs Linux and two to eight cores",
)
async def test_a_busy_program_does_not_hold_the_engine_up() -> None:
    """As OpenMP has it, this took a tenth of the speed and left less."""
    threads = ("--threads", cpu_count())
    clean = {k: "" for k in ("OMP_WAIT_POLICY",) if k in os.environ}
    with serving("demo", *threads, env={**clean, "GOMP_SPINCOUNT": "300000"}) as server:
        with busy_program():
            stubborn = await rate(server, 8)
        assert SLEEPS not in server.log, "who has chosen is left alone"
    with serving("demo", *threads) as server:
        await rate(server, 3)
        assert SLEEPS not in server.log, "its own server and clients are no reason to sleep"
        with busy_program():
            await rate(server, 2)  # in which it notices
            yielding = await rate(server, 8)
            assert server.log.count(SLEEPS) == 1
            assert server.metric("engine_cpu_contention") > 0.05
        await rate(server, 10)  # it may take a trial or two
        assert server.log.count(ALONE) == 1
    assert yielding > 2 * stubborn
