"""A real server is watched while random requests come and go in a tiny KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx2
import pytest

from server.cli.top import ALL_WAIT
from tests.support.serve import Server, serving
from tests.support.watched import OUT, UI, Tables, reading

SEED = random.randrange(10**6)  # printed by a failing test
SMALL = ("--num-gpu-blocks-override", 24, "--max-num-seqs", 8, "--max-model-len", 768)


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """The demo with a KV cache of 24 blocks, in which requests are preempted."""
    with serving("demo", *SMALL) as server:
        yield server


async def send(http: httpx2.AsyncClient, rng: random.Random, stem: list[int]) -> None:
    """Send one request that shares a beginning with others; give up on some of them."""
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(5, 900) for _ in range(20)]
    body = {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 300),
        "ignore_eos": True,
        "seed": rng.randrange(99),
    }
    patience = rng.choice((None, None, None, 0.05, 0.3))
    with contextlib.suppress(httpx2.TimeoutException):
        response = await http.post("/v1/completions", json=body, timeout=patience or 120)
        assert response.status_code == 200, response.text


async def test_rebuilt_tables_equal_every_snapshot_of_the_engine(small: Server) -> None:
    rng = random.Random(SEED)
    stem = [rng.randrange(5, 900) for _ in range(200)]
    async with small.http() as http, reading(http) as reader:

        async def client() -> None:
            for _ in range(6):
                await send(http, rng, stem)

        clients = [asyncio.create_task(client()) for _ in range(12)]
        snapshots = []
        while not all(task.done() for task in clients):
            snapshots.append((await http.get("/ui/api/blocks", headers=UI)).json())
            await asyncio.sleep(0.1)
        await asyncio.gather(*clients)
        await asyncio.sleep(0.5)
        snapshots.append((await http.get("/ui/api/blocks", headers=UI)).json())
        for snapshot in snapshots:
            if snapshot["seq"] in reader.at:  # else it equals the hello, before the first frame
                assert reader.at[snapshot["seq"]] == Tables(snapshot), SEED
        assert len(snapshots) > 5
        assert sum(snapshot["seq"] in reader.at for snapshot in snapshots) > 5
        assert any(snapshot["requests"] for snapshot in snapshots)
        kinds = {event[0] for frame in reader.frames for event in frame["kv"]}
        assert {"take", "end", "preempt", "find", "forget"} <= kinds, SEED
        reasons = {frame["queue"]["reason"] for frame in reader.frames}
        assert reasons & {"rows", "blocks"}
        stats = reader.frames[-1]["stats"]
        shares = [frame["stats"]["held"] for frame in reader.frames]
        assert max(shares) > 12
    assert small.metric("num_preemptions_total") == stats["preemptions"]
    assert small.metric("prefix_cache_hits_total") == stats["prefix_hits"]
    assert small.metric("kv_cache_usage_perc") == stats["held"] == 0


async def test_rebuilt_counts_of_accepted_drafts_equal_every_snapshot(small: Server) -> None:
    body = {"prompt": [7, 8, 9] * 20, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    async with small.http() as http, reading(http) as reader:
        before = small.metric("spec_decode_num_accepted_tokens_total")
        snapshots = []

        async def look() -> None:
            while True:
                snapshots.append((await http.get("/ui/api/blocks", headers=UI)).json())

        task = asyncio.create_task(look())
        for _ in range(5):
            answer = (await http.post("/v1/completions", json=body, timeout=120)).json()
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert small.metric("spec_decode_num_accepted_tokens_total") - before > 100
        compared = [each for each in snapshots if each["seq"] in reader.at and each["requests"]]
        for snapshot in compared:
            assert reader.at[snapshot["seq"]].out == Tables(snapshot).out
        assert len(compared) > 2
        rows = [row for frame in reader.frames for row in frame["requests"]]
    assert rows[-1][OUT] == answer["usage"]["completion_tokens"] == 500


@pytest.mark.slow
async def test_drain_is_not_held_up_by_a_viewer() -> None:
    seconds = []
    for is_watched in (False, True):
        with serving("demo") as server:
            async with server.http() as http, contextlib.AsyncExitStack() as stack:
                if is_watched:
                    await stack.enter_async_context(reading(http))
                begun = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.process.wait, 30)
                seconds.append(time.monotonic() - begun)
                assert server.process.returncode == 0
    assert seconds[1] < seconds[0] + 1.5


def top(server: Server, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "top", "--once", "--url", server.base_url, *flags]
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


async def test_top_once_prints_requests_and_why_they_wait(small: Server) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 600, "ignore_eos": True}
    async with small.http() as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(40)]
        await asyncio.sleep(0.3)
        done = await asyncio.to_thread(top, small)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "demo"
    assert lines[1].startswith("running ")
    assert lines[2].split() == ["id", "state", "prompt", "cached", "out", "blocks", "waits"]
    assert any("running" in line for line in lines[3:])
    assert any("waiting" in line or "preempted" in line for line in lines[3:])
    # Which one it is depends on the step that was caught.
    assert any(reason in done.stdout for reason in (*ALL_WAIT.values(), "no blocks"))


@pytest.mark.slow
def test_top_of_a_server_without_ui_says_why() -> None:
    with serving("demo", "--no-ui") as server:
        done = top(server)
    assert done.returncode == 1
    assert "--ui" in done.stderr
