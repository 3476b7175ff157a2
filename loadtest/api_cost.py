"""Measure the API process's CPU time per streamed token: `python -m loadtest.api_cost`.

32 streams of one `penstock serve` are compared with a bare writer: an ASGI application that sends
the same number of ready chunks, one per event. Both run in turn, several times, and the medians
count. With a parser, the requests have a tool, which the model need not call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx2
import orjson
import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

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


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    """Send TOKENS ready chunks. Other streams run between two of them."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(TOKENS):
        await send({"type": "http.response.body", "body": CHUNK + b"\n\n", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


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


async def cpu_per_token(url: str, process: psutil.Process, fields: dict[str, Any]) -> float:
    """Return the microseconds of CPU that `process` takes per token of all streams."""
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def stream() -> None:
            async with client.stream("POST", PATH, json=fields) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_raw():
                    pass

        before = process.cpu_times()
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        after = process.cpu_times()
    seconds = after.user + after.system - before.user - before.system
    return seconds * 1e6 / (STREAMS * TOKENS)


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


async def rounds(urls: dict[str, str], pids: dict[str, int], repeat: int) -> dict[str, float]:
    """Return the median of each way, measured in turn."""
    found: dict[str, list[float]] = {"bare": [], "plain": [], "parser": []}
    for _ in range(repeat):
        for way, times in found.items():
            place = "bare" if way == "bare" else "server"
            process = psutil.Process(pids[place])
            fields = body(parser=way == "parser")
            times.append(await cpu_per_token(urls[place], process, fields))
    return {way: statistics.median(times) for way, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.api_cost", description=__doc__)
    parser.add_argument("--port", type=int, default=8190, help="and the next one")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        uvicorn.run(bare, host=HOST, port=given.port, log_level="error", lifespan="off")
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
        medians = asyncio.run(rounds(urls, pids, given.repeat))
    finally:
        for process in started.values():
            process.terminate()
            process.wait()
    for way, micros in medians.items():
        ratio = micros / medians["bare"]
        sys.stdout.write(f"{way:8} {micros:6.1f} us of CPU per token, {ratio:4.1f} times bare\n")


if __name__ == "__main__":
    main()
