"""Measure the CPU time of the API process: `python -m loadtest.api_cost`.

The time per streamed token of 32 streams is compared with that of a bare writer: an ASGI
application that sends the same number of ready chunks, one per event. It does so as fast as it can,
and at the pace of the server, one chunk of each stream per step. A process that sleeps between
steps takes longer for the same work, because the processor's caches are cold. All run in turn,
several times, and the medians count. With a parser, the requests have a tool, which the model need
not call.

The time per request is that of one with about 1,000 tokens of prompt and one token of answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson
import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

from loadtest.program import run_program

STREAMS = 32
TOKENS = 400  # of each stream
HOST = "127.0.0.1"
START_S = 60.0
CHUNK = b"data: " + orjson.dumps(
    {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "demo",
        "system_fingerprint": "fp_00000000",
        "choices": [
            {"index": 0, "delta": {"content": " the"}, "logprobs": None, "finish_reason": None}
        ],
    }
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
PATH = "/v1/chat/completions"
LONG_PROMPT = "Tell me a story about a girl who lives by the sea. " * 62  # about 1,000 tokens
REQUESTS = 64  # with the long prompt, a few at a time
AT_ONCE = 4


class BareWriter:
    """Sends TOKENS ready chunks to each client. The query is the seconds between two chunks."""

    def __init__(self) -> None:
        self._step: asyncio.Future[None] | None = None  # ends at the same moment for all streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        seconds = float(scope["query_string"] or 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(TOKENS):
            await send({"type": "http.response.body", "body": CHUNK + b"\n\n", "more_body": True})
            await self._wait(seconds)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait(self, seconds: float) -> None:
        if seconds == 0:
            await asyncio.sleep(0)
            return
        if self._step is None or self._step.done():
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            loop.call_later(seconds, self._step.set_result, None)
        await self._step


def body(*, parser: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "ignore_eos": True,
        "min_tokens": TOKENS,
        "max_tokens": TOKENS,
        "temperature": 1,
    }
    return fields | {"tools": [TOOL]} if parser else fields


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class Cost:
    """The result of one measurement."""

    micros: float  # of CPU per token
    step: float  # seconds of wall time per token of a stream


async def cost_of_streams(url: str, process: psutil.Process, fields: dict[str, Any]) -> Cost:
    """Measure all streams at once. `url` is that of the route, with a query or without."""
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(timeout=600, limits=limits) as client:

        async def stream() -> None:
            async with client.stream("POST", url, json=fields) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_raw():
                    pass

        began = time.monotonic()
        before = cpu_seconds(process)
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        seconds = cpu_seconds(process) - before
        step = (time.monotonic() - began) / TOKENS
    return Cost(seconds * 1e6 / (STREAMS * TOKENS), step)


async def cost_of_requests(url: str, process: psutil.Process) -> tuple[float, int]:
    """Return the milliseconds of CPU per request with a long prompt, and the prompt's tokens."""
    turns = asyncio.Semaphore(AT_ONCE)
    fields = {"messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": 1}
    async with httpx2.AsyncClient(timeout=600) as client:

        async def request() -> int:
            async with turns:
                response = await client.post(url, json=fields)
            assert response.status_code == 200, response.text
            tokens: int = response.json()["usage"]["prompt_tokens"]
            return tokens

        await request()  # the first opens a connection
        before = cpu_seconds(process)
        tokens, *_ = await asyncio.gather(*(request() for _ in range(REQUESTS)))
        seconds = cpu_seconds(process) - before
    return seconds * 1e3 / REQUESTS, tokens


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx2.get(url + "/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} was not ready within {START_S:.0f} s.")


async def measure(urls: dict[str, str], pids: dict[str, int], repeat: int) -> None:
    """Measure in turn, and print the medians."""
    server, writer = psutil.Process(pids["server"]), psutil.Process(pids["bare"])
    server_url, bare_url = urls["server"] + PATH, urls["bare"] + PATH
    found: dict[str, list[float]] = {"bare": [], "bare, paced": [], "plain": [], "parser": []}
    requests: list[float] = []
    for _ in range(repeat):
        plain = await cost_of_streams(server_url, server, body(parser=False))
        parser = await cost_of_streams(server_url, server, body(parser=True))
        bare = await cost_of_streams(bare_url, writer, {})
        paced = await cost_of_streams(f"{bare_url}?{plain.step}", writer, {})
        for way, cost in zip(found, (bare, paced, plain, parser), strict=True):
            found[way].append(cost.micros)
        millis, tokens = await cost_of_requests(server_url, server)
        requests.append(millis)
    medians = {way: statistics.median(times) for way, times in found.items()}
    for way, micros in medians.items():
        fast, slow = micros / medians["bare"], micros / medians["bare, paced"]
        sys.stdout.write(
            f"{way:12} {micros:6.1f} us of CPU per token, {fast:4.1f} times bare, "
            f"{slow:4.1f} times bare at the same pace\n"
        )
    millis = statistics.median(requests)
    sys.stdout.write(f"request      {millis:6.2f} ms of CPU with a prompt of {tokens} tokens\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.api_cost", description=__doc__)
    parser.add_argument("--port", type=int, default=8190, help="and the next one")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        uvicorn.run(BareWriter(), host=HOST, port=given.port, log_level="error", lifespan="off")
        return
    server = [sys.executable, "-m", "server", "serve", "demo", "--log-level", "error"]
    server += ["--port", str(given.port), "--max-num-seqs", str(STREAMS)]
    writer = [sys.executable, "-m", "loadtest.api_cost", "--bare", "--port", str(given.port + 1)]
    urls = {"server": f"http://{HOST}:{given.port}", "bare": f"http://{HOST}:{given.port + 1}"}
    started = {name: subprocess.Popen(c) for name, c in (("server", server), ("bare", writer))}
    try:
        for url in urls.values():
            wait_until_ready(url)
        pids = {name: process.pid for name, process in started.items()}
        asyncio.run(measure(urls, pids, given.repeat))
    finally:
        for process in started.values():
            process.terminate()
            process.wait()


if __name__ == "__main__":
    run_program(main)
