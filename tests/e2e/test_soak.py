"""Twenty-six thousand small requests, or as many as SOAK_MINUTES have room for: what a process
holds after the first of them, it holds after the last, and no more."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import pytest

from tests.e2e.crowd import Wish, send
from tests.e2e.serve import Server, serving

CLIENTS, ROUNDS, ROUND = 16, 26, 1000  # of ROUND requests each
SOAK_S = 60 * float(os.environ.get("SOAK_MINUTES", "0"))
WARM = 14  # rounds in which caches fill: of compiled patterns, of what allocators keep
# How many of oneDNN's kernels torch and oneDNN itself keep. Of the 512 of an engine as we start
# it, half a megabyte each, some are first made after 30 000 requests: CPU and load decide which.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
MB = 2**20
# Measured over 12 rounds after these: the API process at most 0.5 MB (what varies are the pages of
# its allocator), the engine at most 2.1 MB (its heap grows and shrinks by 2 MB pages, hence
# the least of some rounds at each end is compared). A kilobyte kept of each request would be 9 MB.
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


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def growth(held: list[Held]) -> int:
    """From the least memory of the first rounds to the least of the last ones, in bytes."""
    some = max(4, len(held) // 10)
    return min(h.memory for h in held[-some:]) - min(h.memory for h in held[:some])


@dataclass
class Soak:
    """What the API process and the engine held after each round, how many seconds of a core the
    two spent on it (the clients share the cores, and grow), and what became of all."""

    held: list[list[Held]] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def run(self, server: Server) -> None:
        rng, end = random.Random(33), time.monotonic() + SOAK_S
        processes = [psutil.Process(server.process.pid), server.engine]
        while len(self.held) < ROUNDS or time.monotonic() < end:
            before = sum(map(cpu_seconds, processes))
            self.seen += await send(server.address, [Wish.draw(rng) for _ in range(ROUND)], CLIENTS)
            await asyncio.to_thread(server.wait_idle)
            self.spent.append(sum(map(cpu_seconds, processes)) - before)
            self.held.append([Held.by(process) for process in processes])


@pytest.mark.slow
@pytest.mark.timeout(600 + 2 * SOAK_S)
async def test_26_000_requests_leave_nothing_behind(
    record_property: Callable[[str, object], None],
) -> None:
    """Reliability T-33; T-34 with SOAK_MINUTES=480."""
    soak = Soak()
    # Few blocks, so that all have been written to before the measuring begins.
    with serving("demo", "--num-gpu-blocks-override", 64, env=FEW_KERNELS) as server:
        await soak.run(server)
        finished = server.metric("request_success_total")
        aborted = server.metric("aborts_total")
        assert server.metric("aborts_total", reason="disconnect") == aborted
        assert "Traceback" not in server.log
    sent, seen = len(soak.spent) * ROUND, soak.seen
    assert sum(seen.values()) == sent
    assert 0.18 < seen["left"] / sent < 0.22
    assert 0 < aborted <= seen["left"]
    assert finished >= seen["whole"] + seen["streamed"]
    early, late = (statistics.median(some) for some in (soak.spent[1:8], soak.spent[-8:]))
    record_property("late_over_early", late / early)
    print(f"\n{sent} requests; a thousand took {early:.2f} s of a core, then {late:.2f}")
    assert late < 1.25 * early
    for which, most in enumerate((API_BYTES, ENGINE_BYTES)):
        held = [both[which] for both in soak.held[WARM - 1 :]]
        grown = growth(held)
        record_property(f"process_{which}_grew_bytes", grown)
        print(f"process {which} grew by {grown / MB:.1f} of {held[0].memory / MB:.0f} MB")
        assert grown < most, [round(h.memory / MB, 1) for h in held]
        assert held[-1].files <= held[0].files + CLOSING
        assert held[-1].threads <= held[0].threads
