"""CPU time of the API process.

The time per streamed token of 32 streams is compared with that of a bare writer: an ASGI
application that sends the same number of ready chunks, one per event. It does so as fast as it can,
and at the pace of the server, one chunk of each stream per step. A process that sleeps between
steps takes longer for the same work, because the processor's caches are cold. With a parser, the
requests have a tool, which the model need not call.

The time per request is that of one with about 1,000 tokens of prompt and one token of answer.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import orjson
import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

from loadtest.calibration import cpu_seconds
from loadtest.http_client import closed_loop
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.servers import Penstock, Server

STREAMS = 32
TOKENS = 400  # of each stream
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
LONG_BODY = {"messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": 1}
REQUESTS = 64  # with the long prompt, a few at a time
AT_ONCE = 4
# All streams come at once, so that some wait on a busy machine.
FLAGS = ("--max-num-seqs", str(STREAMS), "--max-queue-wait", "60")


class BareWriter:
    """Sends TOKENS ready chunks to each client. The query is the seconds between two chunks."""

    def __init__(self) -> None:
        self._step: asyncio.Future[None] | None = None  # ends at the same moment for all streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = float(scope["query_string"] or 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(TOKENS):
            await send({"type": "http.response.body", "body": CHUNK + b"\n\n", "more_body": True})
            await self._wait(seconds)
        await send({"type": "http.response.body", "body": b""})

    async def _wait(self, seconds: float) -> None:
        if seconds == 0:
            await asyncio.sleep(0)
            return
        if self._step is None or self._step.done():
            loop = asyncio.get_running_loop()
            self._step = loop.create_future()
            loop.call_later(seconds, self._step.set_result, None)
        await self._step


def body(**more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "ignore_eos": True,
        "min_tokens": TOKENS,
        "max_tokens": TOKENS,
        "temperature": 1,
        **more,
    }


def stream_all(server: Server, path: str, fields: dict[str, Any]) -> float:
    """Return the wall seconds of all streams at once."""
    seconds, _ = asyncio.run(closed_loop(server.address, path, [fields] * STREAMS, STREAMS))
    return seconds


class Cost:
    """Measures the CPU time of one process."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._process = psutil.Process(server.process.pid)
        self.step = 0.0  # seconds of wall time per token of a stream, in the last measurement

    def of_streams(self, path: str, fields: dict[str, Any]) -> float:
        """Return microseconds per token."""
        before = cpu_seconds(self._process)
        self.step = stream_all(self.server, path, fields) / TOKENS
        return (cpu_seconds(self._process) - before) * 1e6 / (STREAMS * TOKENS)

    def of_requests(self) -> float:
        """Return milliseconds per request with the long prompt."""
        before = cpu_seconds(self._process)
        asyncio.run(closed_loop(self.server.address, PATH, [LONG_BODY] * REQUESTS, AT_ONCE))
        return (cpu_seconds(self._process) - before) * 1e3 / REQUESTS


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    ours = Cost(stack.enter_context(Penstock("demo", FLAGS)))
    bare = Cost(stack.enter_context(Server([sys.executable, "-m", __name__], "/ready")))
    ours.of_streams(PATH, body())  # warms up, and finds the pace
    ways = {
        "bare": lambda _: bare.of_streams("/", body()),
        "bare, paced": lambda _: bare.of_streams(f"/?{ours.step}", body()),
        "plain": lambda _: ours.of_streams(PATH, body()),
        "parser": lambda _: ours.of_streams(PATH, body(tools=[TOOL])),
    }
    samples = in_turn(ways, options.rounds)
    bounds = [Bound(way, "bare, paced", 4.0, at_most=True) for way in ("plain", "parser")]
    yield Table(samples, "us of CPU per token", ("bare", "bare, paced"), bounds)
    requests = [ours.of_requests() for _ in range(options.rounds)]
    yield Table({"request": requests}, "ms of CPU")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


CASE = Case(__doc__, add_options, measure)

if __name__ == "__main__":  # the bare writer: --port N
    uvicorn.run(BareWriter(), port=int(sys.argv[-1]), log_level="error", lifespan="off")
