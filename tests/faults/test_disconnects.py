"""Clients that disconnect at any moment: their work stops, resources are freed, others continue.

The service runs in the test's own event loop, so that its tasks can be counted. The engine is a
separate process, as in production.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from engine.client.client import ProcessClient
from engine.config import EngineConfig
from tests.support.crowd import RESET
from tests.support.rig import Served, eventually, serving
from tests.support.serve import Case, check, complete, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONCURRENT = 24  # three times max_num_seqs: some clients leave while queued


@dataclass(frozen=True)
class Service:
    client: ProcessClient
    served: Served
    idle_tasks: frozenset[asyncio.Task[Any]]

    def is_clean(self) -> bool:
        client, stats = self.client, self.client.stats
        held = stats.running, stats.waiting, stats.blocks_held
        known = client._streams, client._queue._waiting
        return not any((*held, *known)) and asyncio.all_tasks() <= self.idle_tasks | {
            task for task in (asyncio.current_task(),) if task
        }

    async def settle(self) -> None:
        """Wait until no sequence, KV block, stream or task is left; check /metrics, too."""
        await eventually(self.is_clean, "all resources are free")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert await self.served.metric(name) == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(llama: Path, stories: list[Case]) -> AsyncIterator[Service]:
    config = EngineConfig(
        model=str(llama),
        dtype="float32",
        threads=1,
        block_size=16,
        num_gpu_blocks_override=48,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_queue_wait=600,
    )
    client = ProcessClient(config)
    async with serving(client, llama, log_level="info") as served:  # type: ignore[arg-type]
        await client.wait_ready()
        # The first stream starts a permanent task of the SSE library.
        check(await complete(served.http, greedy(stories[0], stream=True)), stories[0])
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        yield Service(client, served, frozenset(tasks))


@dataclass(frozen=True)
class Leaver:
    """A request and the moment at which its client leaves."""

    body: dict[str, Any]
    moment: str
    amount: float  # share of the bytes sent, seconds, or events, depending on `moment`
    resets: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Leaver:
        stream = rng.random() < 0.6
        moments = ["headers", "body", "sent", "later"] + ["chunk", "decode"] * 2 * stream
        moment = rng.choice(moments)
        amounts = {"later": rng.uniform(0, 0.4), "chunk": 1, "decode": rng.randint(2, 30)}
        body = {
            "prompt": [rng.randint(3, 511) for _ in range(rng.randint(1, 300))],
            "max_tokens": rng.randint(1, 150),
            "stream": stream,
            "n": rng.choice((1, 1, 1, 4)),
            "ignore_eos": True,
        }
        return cls(body, moment, amounts.get(moment, rng.random()), rng.random() < 0.5)

    async def run(self, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        try:
            await self._until_leaving(reader, writer)
        finally:
            if self.resets:
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _until_leaving(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        body = json.dumps(self.body).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n".encode()
        match self.moment:
            case "headers":
                writer.write(head[: int(len(head) * self.amount)])
            case "body":
                writer.write(head + body[: int(len(body) * self.amount)])
            case _:
                writer.write(head + body)
        await writer.drain()
        if self.moment == "later":
            await asyncio.sleep(self.amount)
        events = int(self.amount) if self.moment in ("chunk", "decode") else 0
        while events and (line := await reader.readline()) and b"[DONE]" not in line:
            events -= line.startswith(b"data: ")


async def test_200_disconnects_at_random_moments_free_all_resources(
    service: Service, stories: list[Case], caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(20)
    leavers = [Leaver.draw(rng) for _ in range(200)]
    served = service.served
    aborted = await served.metric("aborts_total", reason="disconnect")
    gate = asyncio.Semaphore(CONCURRENT)

    async def leave(leaver: Leaver) -> None:
        async with gate:
            await leaver.run(served.address)

    async def stay(case: Case) -> None:
        async with gate:
            check(await complete(served.http, greedy(case, stream=len(case.ids) % 2 == 0)), case)

    stayers = [case.after(20 + i, most=50 + i) for i, case in enumerate(stories)]
    crowd = [leave(leaver) for leaver in leavers] + [stay(case) for case in stayers]
    rng.shuffle(crowd)
    await asyncio.gather(*crowd)
    await service.settle()
    aborted = await served.metric("aborts_total", reason="disconnect") - aborted
    assert 20 < aborted < 200
    assert await served.metric("aborts_total") == await served.metric(
        "aborts_total", reason="disconnect"
    )
    records = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
    assert {record["status"] for record in records if "status" in record} == {200, 499}
    assert "Traceback" not in caplog.text
    check(await complete(served.http, greedy(stories[1])), stories[1])


ENDLESS: dict[str, Any] = {"prompt": [1] * 40, "max_tokens": 460, "ignore_eos": True}
MOMENTS = {
    "queued": Leaver({**ENDLESS, "n": 16, "stream": True}, "later", 0.05, False),
    "whole": Leaver({**ENDLESS, "stream": False}, "later", 0.2, True),
    "whole, n=4": Leaver({**ENDLESS, "n": 4, "stream": False}, "later", 0.2, False),
    "first chunk": Leaver({**ENDLESS, "stream": True}, "chunk", 1, False),
    "decoding": Leaver({**ENDLESS, "stream": True}, "decode", 8, True),
    "decoding, n=4": Leaver({**ENDLESS, "n": 4, "stream": True}, "decode", 8, False),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_abandoned_request_is_aborted_and_counted_once(service: Service, moment: str) -> None:
    served = service.served
    before = await served.metric("aborts_total", reason="disconnect")
    succeeded = await served.metric("request_success_total")
    await asyncio.gather(*(MOMENTS[moment].run(served.address) for _ in range(3)))
    step = service.client.stats.step
    await service.settle()
    assert service.client.stats.step - step < 10, "the engine continued abandoned requests"
    assert await served.metric("aborts_total", reason="disconnect") - before == 3
    assert await served.metric("request_success_total") == succeeded


STORM_S = 5
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TALE = json.dumps(ENDLESS | {"stream": True}).encode()
PIECES = [
    b"",
    b"GET /health HT",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n",
    HEAD + b"content-length: %d\r\n\r\n" % len(TALE) + TALE[:-9],
    HEAD + b"content-length: %d\r\n\r\n" % len(TALE) + TALE,
]


def storm(address: tuple[str, int], seconds: float) -> int:
    """Connect, send something, and reset or close, as often as possible; return the count."""
    rng, count, end = random.Random(10), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as peer:
            peer.sendall(rng.choice(PIECES))
            if rng.random() < 0.8:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            count += 1
    return count


@pytest.mark.slow
async def test_connection_storm_leaves_no_descriptor_and_no_task(
    service: Service, stories: list[Case], caplog: pytest.LogCaptureFixture
) -> None:
    """A peer opens connections and resets most of them, over 100 a second."""
    served, process = service.served, psutil.Process()
    await asyncio.to_thread(lambda: None)  # starts the pool's first thread
    await service.settle()
    files, threads = process.num_fds(), process.num_threads()
    raging = asyncio.create_task(asyncio.to_thread(storm, served.address, STORM_S))
    while not raging.done():
        assert (await served.http.get("/health")).status_code == 200
        check(await complete(served.http, greedy(stories[0], stream=True)), stories[0])
    assert await raging > 100 * STORM_S
    await eventually(lambda: len(served.connections) <= 1, "only the test is connected")
    await service.settle()
    assert process.num_fds() <= files
    assert process.num_threads() <= threads
    assert "Traceback" not in caplog.text
    check(await complete(served.http, greedy(stories[1])), stories[1])
