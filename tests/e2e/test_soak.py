"""A soak test: memory, files and threads of the processes do not grow over many small requests.

It sends 26,000 requests, or more if SOAK_MINUTES allows.
"""

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

from tests.support.crowd import Wish, send
from tests.support.serve import Server, serving

CLIENTS, ROUNDS, ROUND = 16, 26, 1000  # a round has ROUND requests
SOAK_S = 60 * float(os.environ.get("SOAK_MINUTES", "0"))
WARM = 14  # rounds in which caches fill, such as compiled patterns and allocators' free lists
# Limits of torch's and oneDNN's kernel caches. An engine usually keeps 512 kernels of 0.5 MB. Some
# of them are first compiled after 30,000 requests, depending on CPU and load.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
MB = 2**20
# Limits of growth. Measured over the 12 rounds after WARM: at most 0.5 MB for the API process, the
# pages of its allocator, and 2.1 MB for the engine. The engine's heap changes in pages of 2 MB, so
# the test compares minima of several rounds. A leak of 1 KB per request would be 9 MB.
API_BYTES, ENGINE_BYTES = 3 * MB, 6 * MB
CLOSING = 2  # connections of this test that may still be closing


@dataclass(frozen=True)
class Held:
    """The resources of one idle process."""

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
    """Return the bytes from the minimum of the first rounds to the minimum of the last ones."""
    some = max(4, len(held) // 10)
    return min(h.memory for h in held[-some:]) - min(h.memory for h in held[:some])


@dataclass
class Soak:
    """Run rounds of requests and record the state of the API process and the engine.

    CPU time is recorded instead of wall time, because the clients share the cores and slow down as
    they grow.
    """

    held: list[list[Held]] = field(default_factory=list)  # (API process, engine) after each round
    spent: list[float] = field(default_factory=list)  # CPU seconds of both in each round
    seen: Counter[str] = field(default_factory=Counter)  # outcomes of all requests

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
async def test_26_000_requests_do_not_grow_the_processes(
    record_property: Callable[[str, object], None],
) -> None:
    """SOAK_MINUTES=480 makes this the eight-hour soak test."""
    soak = Soak()
    # Few blocks, so that all of them have been written to before the measurement begins.
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
    print(f"\n{sent} requests; CPU seconds per 1000: {early:.2f} at first, {late:.2f} at the end")
    assert late < 1.25 * early
    for which, most in enumerate((API_BYTES, ENGINE_BYTES)):
        held = [both[which] for both in soak.held[WARM - 1 :]]
        grown = growth(held)
        record_property(f"process_{which}_grew_bytes", grown)
        print(f"process {which} grew by {grown / MB:.1f} of {held[0].memory / MB:.0f} MB")
        assert grown < most, [round(h.memory / MB, 1) for h in held]
        assert held[-1].files <= held[0].files + CLOSING
        assert held[-1].threads <= held[0].threads
