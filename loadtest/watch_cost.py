"""Measure what watching the engine costs: `python -m loadtest.watch_cost`.

Three ways take turns, in an order that rotates: a server with --no-ui, one with the built-in pages
and no viewer, and the same one while a viewer reads /ui/api/watch. Each serves 32 streams. A ratio
is that of two ways in one round; the medians of the rounds are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx2

from loadtest.api_cost import HOST, PATH, STREAMS, body, wait_until_ready
from loadtest.program import check_model, run_program

WAYS = ("no pages", "unwatched", "watched")
WATCH = "/ui/api/watch?blocks=1"
HEADERS = {"X-Penstock-UI": "1"}


@dataclass
class View:
    """The frames and bytes that a viewer has received."""

    frames: int = 0
    bytes: int = 0


@dataclass
class Found:
    """Tokens per second of each way, by round, and what the viewer received in the last one."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    view: View = field(default_factory=View)
    seconds: float = 0.0  # of the last watched round


async def tokens_per_second(url: str) -> float:
    """Return the rate of all streams together, from the first request to the last token."""
    fields = body(parser=False)
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(timeout=600, limits=limits) as client:

        async def stream() -> None:
            async with client.stream("POST", url + PATH, json=fields) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_raw():
                    pass

        began = time.monotonic()
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        return STREAMS * float(fields["max_tokens"]) / (time.monotonic() - began)


@contextlib.asynccontextmanager
async def viewing(url: str) -> AsyncIterator[View]:
    """Watch the engine until the context ends."""
    view = View()
    begun = asyncio.Event()
    async with httpx2.AsyncClient(timeout=600) as client:

        async def read() -> None:
            async with client.stream("GET", url + WATCH, headers=HEADERS) as response:
                assert response.status_code == 200, await response.aread()
                async for data in response.aiter_raw():
                    view.bytes += len(data)
                    view.frames += data.count(b"event: frame")
                    begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 60)
        try:
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def measure(urls: dict[str, str], rounds: int) -> Found:
    found = Found()
    for url in set(urls.values()):
        await tokens_per_second(url)  # warms up
    for number in range(rounds):
        first = number % len(WAYS)
        for way in (*WAYS[first:], *WAYS[:first]):
            if way != "watched":
                found.rates[way].append(await tokens_per_second(urls[way]))
                continue
            async with viewing(urls[way]) as view:
                began = time.monotonic()
                found.rates[way].append(await tokens_per_second(urls[way]))
                found.seconds = time.monotonic() - began
            found.view = view
        line = ", ".join(f"{way} {rates[-1]:.0f}" for way, rates in found.rates.items())
        sys.stdout.write(f"round {number + 1}: {line} tokens/s\n")
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of two ways, round by round."""
    return statistics.median([a / b for a, b in zip(above, below, strict=True)])


def report(found: Found) -> str:
    rates = found.rates
    lines = [f"{way:10} {statistics.median(rates[way]):8.0f} tokens/s" for way in WAYS]
    lines.append(f"unwatched / no pages {ratio(rates['unwatched'], rates['no pages']):.3f}")
    lines.append(f"watched / unwatched  {ratio(rates['watched'], rates['unwatched']):.3f}")
    per_second = found.view.bytes / max(found.seconds, 1e-9)
    frames = found.view.frames / max(found.seconds, 1e-9)
    lines.append(f"the viewer got {frames:.1f} frames and {per_second / 1000:.1f} kB a second")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.watch_cost", description=__doc__)
    parser.add_argument("--port", type=int, default=8192, help="and the next one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    check_model(given.model)
    serve = [sys.executable, "-m", "server", "serve", given.model, "--log-level", "error"]
    serve += ["--max-num-seqs", str(STREAMS)]
    plain, pages = f"http://{HOST}:{given.port}", f"http://{HOST}:{given.port + 1}"
    urls = {"no pages": plain, "unwatched": pages, "watched": pages}
    started = [
        subprocess.Popen([*serve, "--no-ui", "--port", str(given.port)]),
        subprocess.Popen([*serve, "--ui", "--port", str(given.port + 1)]),
    ]
    try:
        for url in (plain, pages):
            wait_until_ready(url)
        found = asyncio.run(measure(urls, given.rounds))
    finally:
        for process in started:
            process.terminate()
            process.wait()
    sys.stdout.write(report(found) + "\n")


if __name__ == "__main__":
    run_program(main)
