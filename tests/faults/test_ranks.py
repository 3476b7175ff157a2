"""`penstock serve` with two ranks: it answers, and the death of either ends everything at once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import psutil
import pytest

from engine.parallel.stall import STOPPED_S
from server import exit_codes
from tests.faults.test_death import SEEN_S, Record, note, read_raw, timed, until
from tests.support.adapters import random_adapter
from tests.support.process import eventually
from tests.support.serve import Case, Server, check, complete, greedy, serving, starting

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


async def test_stopped_follower_ends_every_stream_with_error(
    llama: Path, record_property: Record
) -> None:
    """It is not dead, so its connections stay open."""
    with serving(llama, "--dtype", "float32", *RANKS) as server:
        async with server.http() as http:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(timed(read_raw(http, begun))) for _ in range(4)]
            for _ in streams:
                await begun.acquire()
            follower_of(server).suspend()
            stopped = time.monotonic()
            ends = []
            for text, at in await asyncio.gather(*streams):
                *_, last = text.strip().split("\n\n")
                assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
                ends.append(at)
        assert server.status() == exit_codes.ENGINE_DIED
        assert server.last_line == (
            "penstock: The processes of the model have stalled for 10 s: "
            "rank 1 is stopped by a signal."
        )
    note(record_property, "streams_ended_after", max(ends) - stopped, STOPPED_S + 2 * SEEN_S)


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


async def test_adapter_is_loaded_by_all_processes(
    llama: Path, stories: list[Case], tmp_path: Path
) -> None:
    path = random_adapter(tmp_path / "adapter", llama)
    found = []
    for ranks in ((), RANKS):
        with serving(llama, "--dtype", "float32", "--max-loras", "1", *ranks) as server:
            async with server.http() as http:
                body = {"lora_name": "fr", "lora_path": str(path)}
                loaded = await http.post("/v1/load_lora_adapter", json=body)
                assert loaded.status_code == 200, loaded.text
                found.append((await complete(http, greedy(stories[0], model="fr"))).ids)
                check(await complete(http, greedy(stories[0])), stories[0])
    assert found[0] == found[1] != stories[0].ids


def test_adapter_that_no_process_can_use_is_reported_by_rank_0(llama: Path, tmp_path: Path) -> None:
    """Each rank finds the problem, and the death of the others must not hide it."""
    path = random_adapter(tmp_path / "adapter", llama, rank=9)
    flags = ("--lora-modules", f"fr={path}", "--max-lora-rank", "8")
    with starting(llama, *flags, *RANKS) as server:
        assert server.status(60) == exit_codes.BAD_CONFIG
        assert "--lora-modules fr: " in server.last_line
        assert "--max-lora-rank is 8" in server.last_line
