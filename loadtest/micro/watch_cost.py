"""Throughput of a server that is watched.

Three ways take turns: a server with --no-ui, one with the built-in pages and no viewer, and the
same one while a viewer reads /ui/api/watch. Each serves 32 streams.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx2

from loadtest.http_client import closed_loop
from loadtest.micro.api_cost import FLAGS, PATH, STREAMS, TOKENS, body, stream_all
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.program import check_model
from loadtest.servers import Penstock, Server

WATCH = "/ui/api/watch?blocks=1"
HEADERS = {"X-Penstock-UI": "1"}


@dataclass
class View:
    """Frames and bytes that the viewer got in the last round."""

    frames: int = 0
    bytes: int = 0
    seconds: float = 1.0

    def __str__(self) -> str:
        frames, size = self.frames / self.seconds, self.bytes / self.seconds
        return f"the viewer got {frames:.1f} frames and {size / 1000:.1f} kB a second"


async def stream_all_watched(server: Server) -> View:
    """Watch the engine while all streams run."""
    view = View()
    begun = asyncio.Event()
    async with httpx2.AsyncClient(timeout=600) as client:

        async def read() -> None:
            url = f"http://{server.address}{WATCH}"
            async with client.stream("GET", url, headers=HEADERS) as response:
                assert response.status_code == 200, await response.aread()
                async for data in response.aiter_raw():
                    view.bytes += len(data)
                    view.frames += data.count(b"event: frame")
                    begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 60)
        view.seconds, _ = await closed_loop(server.address, PATH, [body()] * STREAMS, STREAMS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return view


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    check_model(options.model)
    plain = stack.enter_context(Penstock(options.model, [*FLAGS, "--no-ui"]))
    pages = stack.enter_context(Penstock(options.model, [*FLAGS, "--ui"]))
    views: list[View] = []

    def watched(_: int) -> float:
        views.append(asyncio.run(stream_all_watched(pages)))
        return STREAMS * TOKENS / views[-1].seconds

    for server in (plain, pages):
        stream_all(server, PATH, body())  # warms up
    ways = {
        "no pages": lambda _: STREAMS * TOKENS / stream_all(plain, PATH, body()),
        "unwatched": lambda _: STREAMS * TOKENS / stream_all(pages, PATH, body()),
        "watched": watched,
    }
    samples = in_turn(ways, options.rounds)
    bounds = [Bound("watched", "unwatched", 0.9)]
    notes = {"watched": str(views[-1])}
    yield Table(samples, "tokens/s", ("no pages", "unwatched"), bounds, notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")


CASE = Case(__doc__, add_options, measure)
