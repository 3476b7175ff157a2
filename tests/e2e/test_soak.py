"""Twenty-six thousand small requests: what a process holds after the first of them, it holds after
the last, and no more."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

from tests.e2e.crowd import Wish, send
from tests.e2e.serve import Server, serving

CLIENTS, ROUNDS, ROUND = 16, 26, 1000
WARM = 14  # rounds in which caches fill: of compiled patterns, of what allocators keep
# How many of oneDNN's kernels torch and oneDNN itself keep. Of the 512 of an engine as we start
# it, half a megabyte each, some are first made after 30 000 requests: CPU and load decide which.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
MB = 2**20
# Measured over 12 rounds after these: the API process at most 0.5 MB (what varies are the pages of
# its allocator), the engine at most 2.1 MB (its heap grows and shrinks by 2 MB pages). One kilobyte
# kept of each request would be 12 MB.
API_BYTES, ENGINE_BYTES = 3 * MB, 6 * MB
CLOSING = 2  # connections of the test's own that end just now


@dataclass(frozen=True)
class Held:
    """What one process holds while nobody wants anything."""

    memory: int  # resident bytes
    files: int
    threads: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


async def rounds(server: Server) -> tuple[list[list[Held]], Counter[str]]:
    """What the API process and the engine held after each round, and what became of all."""
    rng, seen = random.Random(33), Counter[str]()
    processes = [psutil.Process(server.process.pid), server.engine]
    history = []
    for _ in range(ROUNDS):
        seen += await send(server.address, [Wish.draw(rng) for _ in range(ROUND)], CLIENTS)
        await asyncio.to_thread(server.wait_idle)
        history.append([Held.by(process) for process in processes])
    return history, seen


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_26_000_requests_leave_nothing_behind(
    record_property: Callable[[str, object], None],
) -> None:
    """Reliability T-33."""
    # Few blocks, so that all have been written to before the measuring begins.
    with serving("demo", "--num-gpu-blocks-override", 64, env=FEW_KERNELS) as server:
        history, seen = await rounds(server)
        finished = server.metric("request_success_total")
        aborted = server.metric("aborts_total")
        assert server.metric("aborts_total", reason="disconnect") == aborted
        assert "Traceback" not in server.log
    assert sum(seen.values()) == ROUNDS * ROUND
    assert 0.18 < seen["left"] / (ROUNDS * ROUND) < 0.22
    assert 0 < aborted <= seen["left"]
    assert finished >= seen["whole"] + seen["streamed"]
    for which, most in enumerate((API_BYTES, ENGINE_BYTES)):
        held = [both[which] for both in history[WARM - 1 :]]
        grown = held[-1].memory - held[0].memory
        record_property(f"process_{which}_grew_bytes", grown)
        assert grown < most, [round(h.memory / MB, 1) for h in held]
        assert held[-1].files <= held[0].files + CLOSING
        assert held[-1].threads <= held[0].threads
