"""A server's memory: the plan holds under load, a container's limit is enough, servers share.

TESTS_INSTRUCT_MODEL names a folder with a larger model than the demo's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.support import web
from tests.support.serve import Server, serving, starting

pytestmark = pytest.mark.slow
MODEL = os.environ.get("TESTS_INSTRUCT_MODEL", "demo")
LOAD_S = 60 * float(os.environ.get("MEMORY_MINUTES", "10"))
CLIENTS, MB, GIB = 64, 10**6, 2**30
KV_BYTES = 128 << 20  # small, so that the load fills all of it
CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1
MOST = "memory.max_usage_in_bytes"


def resident(server: Server) -> int:
    processes = [server.process.pid, server.engine.pid]
    return sum(psutil.Process(pid).memory_info().rss for pid in processes)


def planned(*flags: object, model: str | Path = MODEL) -> int:
    """Return the bytes that `penstock serve --plan` promises."""
    command = [sys.executable, "-m", "server", "serve", str(model), "--plan", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [said] = re.findall(r"^ *([\d,]+) .* in all", done.stdout, re.MULTILINE)
    return int(said.replace(",", ""))


async def client(
    http: httpx2.AsyncClient, end: float, longest: int, rng: random.Random, seen: Counter[str]
) -> None:
    """Send requests until `end`. The client leaves half of them before they are done."""
    while time.monotonic() < end:
        length = rng.choice([rng.randint(1, 64), rng.randint(1, longest)])
        body = {
            "prompt": [rng.randrange(300, 2000) for _ in range(length)],
            "max_tokens": rng.randint(1, 200),
            "ignore_eos": True,
            "stream": True,
            "temperature": rng.choice([0, 1]),
        }
        patience = rng.uniform(0.1, 8) if rng.random() < 0.5 else 600
        patience = min(patience, end - time.monotonic())
        try:
            async with (
                asyncio.timeout(patience),
                http.stream("POST", "/v1/completions", json=body) as response,
            ):
                seen[str(response.status_code)] += 1
                async for _ in response.aiter_bytes():
                    pass
            seen["whole"] += 1
        except TimeoutError:
            seen["left"] += 1


async def load(server: Server, seconds: float) -> tuple[list[int], Counter[str]]:
    """Return the resident bytes, once every two seconds, and what became of the requests."""
    seen: Counter[str] = Counter()
    end, held = time.monotonic() + seconds, []
    [model] = web.get(f"{server.base_url}/v1/models", timeout=30).json()["data"]
    longest = min(4000, model["max_model_len"] - 200)
    limits = httpx2.Limits(max_connections=2 * CLIENTS)
    async with server.http(limits=limits) as http, asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(http, end, longest, random.Random(number), seen))
        while time.monotonic() < end:
            await asyncio.sleep(2)
            held.append(resident(server))
    return held, seen


@pytest.mark.timeout(600 + 2 * LOAD_S)
async def test_memory_under_mixed_load_stays_within_the_plan_and_is_level() -> None:
    flags = ("--kv-cache-memory-bytes", KV_BYTES)
    promised = planned(*flags)
    with serving(MODEL, *flags) as server:
        idle = resident(server)
        held, seen = await load(server, LOAD_S)
        assert "Traceback" not in server.log
    quarter = len(held) // 4
    *most, third, last = [max(held[n * quarter : (n + 1) * quarter]) for n in range(4)]
    shown = ", ".join(str(value // MB) for value in (*most, third, last))
    print(f"\nplan {promised // MB} MB; idle {idle // MB}; at most, by quarters: {shown}")
    print(seen)
    assert seen["whole"] > CLIENTS
    assert seen["left"] > CLIENTS
    assert seen.keys() <= {"200", "whole", "left"}
    assert last <= 1.05 * promised
    assert last <= 1.02 * third


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """Make a control group with this limit; skip the test where this process may not."""
    group = CGROUPS / f"penstock-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size))
    except OSError as error:
        pytest.skip(f"cannot make a control group (version 1): {error}")
    try:
        yield group
    finally:
        group.rmdir()


@contextlib.contextmanager
def joined(group: Path) -> Iterator[None]:
    """Move this process to `group` and back. Children stay in the group they were started in."""
    [own] = re.findall(r":memory:/(.*)", Path("/proc/self/cgroup").read_text())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (CGROUPS / own / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.timeout(600)
async def test_server_in_a_container_of_1_gib_serves_under_load() -> None:
    """The kernel enforces the limit: it kills a process that takes more."""
    with memory_limit(GIB) as group, contextlib.ExitStack() as stack:
        with joined(group):
            server = stack.enter_context(starting(MODEL))
        server.wait_ready()
        _, seen = await load(server, 60)
        assert seen["whole"] > 0
        assert "Traceback" not in server.log
        read = {name: (group / name).read_text() for name in ("memory.oom_control", MOST)}
    print(f"\nat most {int(read[MOST]) // MB} MB of {GIB // MB}, files included; {seen}")
    assert "oom_kill 0" in read["memory.oom_control"]


@pytest.mark.parametrize("count", [2, 4])
async def test_servers_started_at_once_serve(count: int) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(starting(MODEL)) for _ in range(count)]
        for server in servers:
            server.wait_ready()
        for server in servers:
            body = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
            answer = web.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8
        print(f"\n{count} servers: {sum(map(resident, servers)) // MB} MB")
