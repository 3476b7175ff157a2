"""`penstock serve` with two ranks: it answers, and the death of either ends everything at once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import psutil
import pytest

from server.cli import exit_codes
from tests.faults.test_death import SEEN_S, Record, note, read_raw, timed, until
from tests.support.process import eventually
from tests.support.serve import Case, Server, check, complete, greedy, serving

pytestmark = pytest.mark.slow
RANKS = ("--tensor-parallel-size", "2")


def follower_of(server: Server) -> psutil.Process:
    [follower] = server.engine.children()
    assert "engine.parallel.follower" in follower.cmdline()
    return follower


async def test_killed_follower_ends_every_stream_with_error(
    llama: Path, stories: list[Case], record_property: Record
) -> None:
    with serving(llama, "--dtype", "float32", *RANKS) as server:
        async with server.http() as http:
            for case in stories[:2]:
                check(await complete(http, greedy(case, stream=True)), case)
            [model] = (await http.get("/v1/models")).json()["data"]
            assert model["tensor_parallel_size"] == server.metric("tensor_parallel_size") == 2
            held = {"rank": "1", "use": "KV cache"}
            assert server.metric("rank_memory_bytes", **held) > 0
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(timed(read_raw(http, begun))) for _ in range(8)]
            for _ in streams:
                await begun.acquire()
            await until(lambda: server.metric("num_requests_running") == 8, "8 run")
            follower_of(server).kill()
            killed = time.monotonic()
            ends = []
            for text, at in await asyncio.gather(*streams):
                *_, last = text.strip().split("\n\n")
                assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
                assert "[DONE]" not in text
                ends.append(at)
        assert server.status() == exit_codes.ENGINE_DIED
        assert server.last_line == "penstock: The process of rank 1 was killed by signal 9."
    note(record_property, "streams_ended_after", max(ends) - killed, SEEN_S)


@pytest.mark.parametrize("killed", ["engine", "server", "idle follower"])
def test_death_of_a_process_leaves_no_other_behind(llama: Path, killed: str) -> None:
    with serving(llama, *RANKS) as server:
        engine, follower = server.engine, follower_of(server)
        victims = {"engine": engine, "server": server.process, "idle follower": follower}
        victims[killed].kill()
        psutil.wait_procs([engine, follower], timeout=5)
        eventually(lambda: not engine.is_running() and not follower.is_running(), "both ended")
        if killed != "server":
            assert server.status() == exit_codes.ENGINE_DIED
            assert list(server.temp.iterdir()) == []
