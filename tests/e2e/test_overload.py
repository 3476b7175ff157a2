"""An overloaded server refuses requests at once, and finishes the requests that it accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.process import eventually
from tests.support.serve import Case, Server, check, complete, greedy, serving

BLOCK, BLOCKS = 16, 32
CAPACITY = BLOCK * BLOCKS
QUEUE = 60
PROMISED_S = 0.050  # time of a refusal, from the last byte of the request to the status line
BUSY_S = 1.0  # the same on a machine that is busy with other work


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Server]:
    flags = ("--block-size", BLOCK, "--num-gpu-blocks-override", BLOCKS)
    with serving(llama, "--dtype", "float32", *flags, "--max-num-queued-reqs", QUEUE) as server:
        yield server


async def test_60_requests_in_few_blocks_equal_the_reference(
    server: Server, stories: list[Case]
) -> None:
    crowd = [
        stories[i % len(stories)].after((0, 11, 23, 47)[i % 4], most=10 + i) for i in range(60)
    ]
    before = server.metric("num_preemptions_total")
    async with server.http() as http:
        bodies = [greedy(case, stream=i % 2 == 0) for i, case in enumerate(crowd)]
        answers = await asyncio.gather(*(complete(http, body) for body in bodies))
    for answer, case in zip(answers, crowd, strict=True):
        check(answer, case)
    preemptions = server.metric("num_preemptions_total") - before
    assert 0 < preemptions <= 10 * len(crowd)
    server.wait_idle()


async def test_empty_queue_accepts_one_request_above_its_limit(
    server: Server,
) -> None:
    body = {"prompt": [[1, 403 + i] for i in range(8)], "n": 16, "max_tokens": 1}
    async with server.http() as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 128 > QUEUE


async def test_request_above_the_capacity_gets_a_400_and_others_continue(
    server: Server, stories: list[Case]
) -> None:
    async with server.http() as http:
        others = [asyncio.create_task(complete(http, greedy(case))) for case in stories]
        response = await http.post("/v1/completions", json={"prompt": [5] * (CAPACITY + 9)})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(CAPACITY) in error["message"]
        assert str(CAPACITY + 9) in error["message"]
        body = {"prompt": [5] * (CAPACITY - 12), "max_tokens": 13, "ignore_eos": True}
        response = await http.post("/v1/completions", json=body)
        assert response.headers["x-adjusted-params"] == "max_tokens=12"
        assert response.json()["usage"]["completion_tokens"] == 12
        for other, case in zip(others, stories, strict=True):
            check(await other, case)
        room = CAPACITY - len(stories[0].prompt_ids)
        body = greedy(stories[0], max_tokens=room, ignore_eos=True)
        assert len((await complete(http, body)).ids) == room


@contextlib.asynccontextmanager
async def full_queue(server: Server) -> AsyncIterator[None]:
    """Fill the queue; on exit, disconnect the clients.

    One sequence runs for 256 steps, and its blocks leave no room for the waiting ones.
    """
    half = CAPACITY // 2
    async with server.http() as http:

        def start(prompts: list[list[int]]) -> asyncio.Task[Any]:
            body = {"prompt": prompts, "max_tokens": half, "ignore_eos": True}
            return asyncio.create_task(http.post("/v1/completions", json=body))

        tasks = [start([[3] * half])]
        await in_thread(lambda: server.metric("num_requests_running") == 1)
        tasks.append(start([[10 + i] * half for i in range(QUEUE)]))
        await in_thread(lambda: web.get(f"{server.base_url}/ready").status_code == 503)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    server.wait_idle()


async def in_thread(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, condition, "the queue is as the test needs it")


def probe(address: tuple[str, int]) -> tuple[float, bytes]:
    """Send a request; return the seconds until the status line, and the whole response."""
    body = b'{"prompt": "Hi", "max_tokens": 1, "n": 16}'
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
    with socket.create_connection(address, timeout=30) as connection:
        began = time.perf_counter()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n" + body
        )
        answer = connection.recv(65536)
        seconds = time.perf_counter() - began
        while more := connection.recv(65536):
            answer += more
    return seconds, answer


async def test_full_queue_refuses_with_503_at_once(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    async with full_queue(server):
        probes = await asyncio.to_thread(lambda: [probe(server.address) for _ in range(15)])
        health = web.get(f"{server.base_url}/health")
        ready = web.get(f"{server.base_url}/ready")
    assert health.status_code == 200
    assert (ready.status_code, ready.json()["status"]) == (503, "overloaded")
    for _, answer in probes:
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        assert lines[0].startswith("http/1.1 503 ")
        [retry_after] = [line for line in lines if line.startswith("retry-after: ")]
        assert 1 <= int(retry_after.partition(": ")[2]) <= 60
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "server_overloaded")
        assert f"{QUEUE} requests" in error["message"]
    seconds = [seconds for seconds, _ in probes]
    record_property("median_refusal_ms", round(statistics.median(seconds) * 1000, 2))
    print(
        f"\nrefusal: median {statistics.median(seconds) * 1000:.1f} ms, "
        f"worst {max(seconds) * 1000:.1f} ms, promised {PROMISED_S * 1000:.0f} ms"
    )
    assert statistics.median(seconds) < BUSY_S


@pytest.mark.slow
async def test_max_queue_wait_refuses_requests_that_would_wait_longer(
    llama: Path, stories: list[Case]
) -> None:
    """The engine is suspended, so the queue does not move. The first request is accepted, and
    later ones are refused. After the engine resumes, the accepted request is finished."""
    with serving(llama, "--dtype", "float32", "--max-queue-wait", 0.2) as server:
        async with server.http() as http:
            server.engine.suspend()
            taken = asyncio.create_task(complete(http, greedy(stories[0])))
            await in_thread(lambda: web.get(f"{server.base_url}/ready").status_code == 503)
            refusals = [await http.post("/v1/completions", json=greedy(case)) for case in stories]
            server.engine.resume()
            check(await taken, stories[0])
            check(await complete(http, greedy(stories[1])), stories[1])
    for refusal in refusals:
        assert refusal.status_code == 503
        assert "the limit is 0.2 s (--max-queue-wait)" in refusal.json()["error"]["message"]


@dataclass
class Flood:
    """Send requests of equal size and record their outcomes."""

    address: tuple[str, int]
    finished: list[float] = field(default_factory=list)  # time of the end, perf_counter seconds
    refused: list[float] = field(default_factory=list)  # seconds until the refusal
    _sent: int = 0

    async def ask(self) -> None:
        self._sent += 1
        body = json.dumps({"prompt": f"{self._sent} is", "max_tokens": 80, "ignore_eos": True})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection(*self.address)
        began = time.perf_counter()
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"{head}\r\n{body}".encode()
        )
        told = (await reader.readuntil(b"\r\n\r\n")).lower()
        if told.startswith(b"http/1.1 503 "):
            self.refused.append(time.perf_counter() - began)
            assert b"\r\nretry-after: " in told
            assert b'"server_overloaded"' in await reader.read()
        else:
            assert told.startswith(b"http/1.1 200 ")
            assert b'"length"' in await reader.read()
            self.finished.append(time.perf_counter())
        writer.close()

    async def by_turns(self, clients: int, seconds: float) -> float:
        """Run `clients` that send the next request after each answer.

        Returns the finished requests per second.
        """
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self.ask()

        self.finished.clear()
        await asyncio.gather(*(client() for _ in range(clients)))
        return sum(when < end for when in self.finished) / seconds

    async def at(self, rate: float, seconds: float) -> float:
        """Send `rate` requests per second without waiting for answers.

        Returns the finished requests per second; the first two seconds do not count.
        """
        self.finished.clear()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            sent = 0
            while (now := time.perf_counter() - began) < seconds:
                while sent < rate * now:
                    sent += 1
                    tasks.create_task(self.ask())
                await asyncio.sleep(0.005)
        return sum(2 < when - began < seconds for when in self.finished) / (seconds - 2)


@pytest.mark.slow
async def test_five_times_the_peak_load_keeps_80_percent_of_the_throughput(
    record_property: Callable[[str, object], None],
) -> None:
    """It also refuses the excess within 1 s, bounds its queue and is fast again afterwards."""
    with serving("demo", "--max-num-seqs", 16, "--max-num-queued-reqs", QUEUE) as server:
        flood, waiting = Flood(server.address), [0.0]
        peak = max([await flood.by_turns(clients, 8) for clients in (16, 32, QUEUE)])
        assert not flood.refused
        running = asyncio.create_task(flood.at(5 * peak, 20))
        while not running.done():
            waiting.append(await asyncio.to_thread(server.metric, "num_requests_waiting"))
            await asyncio.sleep(0.1)
        share = await running / peak
        # All requests have been answered: the server has finished the ones that it accepted.
        began = time.perf_counter()
        await flood.ask()
        alone = time.perf_counter() - began
        worst = sorted(flood.refused)[-len(flood.refused) // 20]
        for name, value in (("share", share), ("alone_s", alone), ("refused_s", worst)):
            record_property(name, value)
        print(
            f"\npeak {peak:.1f}/s; {share:.0%} of it at five times the load; {len(flood.refused)} "
            f"refused, 95 % in {worst * 1000:.1f} ms; then one alone takes {alone * 1000:.0f} ms"
        )
        assert QUEUE / 2 < max(waiting) <= QUEUE
        assert share > 0.8
        assert worst < BUSY_S
        assert alone < 2
        assert "Traceback" not in server.log
        server.wait_idle()
