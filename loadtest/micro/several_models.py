"""The cost of `penstock serve A B` for a request.

The same server of a model is reached in two ways in turn: at its own Unix socket, and through the
parent's port. Two servers cannot be compared, because an engine that finds its cores busy once is
slower from then on. The first table is the throughput of 32 streams. The second has the
milliseconds of a request for one token, one after another on one connection.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil

from loadtest.micro.api_cost import FLAGS, PATH, STREAMS, TOKENS, body
from loadtest.micro.case import Bound, Case, Table, in_turn
from loadtest.servers import Penstock

OTHER = "demo-translate"  # the second model, which is not loaded
REQUESTS = 100  # of a round
MOST_ADDED_MS = 1.0
LONGEST = 64 << 20  # bytes of an answer

Way = int | str  # a port of this machine, or the path of a Unix socket


def request(path: str, fields: dict[str, Any]) -> bytes:
    data = orjson.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(way: Way) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(way, str):
        return await asyncio.open_unix_connection(way, limit=LONGEST)
    return await asyncio.open_connection("127.0.0.1", way, limit=LONGEST)


async def stream(way: Way, asked: bytes) -> None:
    """Read one stream to its end."""
    reader, writer = await connect(way)
    writer.write(asked)
    text = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    assert text.startswith(b"HTTP/1.1 200"), text[:500]
    assert b"[DONE]" in text, text[-500:]


def throughput(way: Way, name: str, tokens: int, _: int = 0) -> float:
    """Return tokens per second of all streams at once."""
    asked = request(PATH, body(model=name, min_tokens=tokens, max_tokens=tokens))

    async def all_streams() -> None:
        await asyncio.gather(*[stream(way, asked) for _ in range(STREAMS)])

    began = time.perf_counter()
    asyncio.run(all_streams())
    return STREAMS * tokens / (time.perf_counter() - began)


async def _latency(way: Way, name: str) -> float:
    reader, writer = await connect(way)
    asked = request("/v1/completions", {"model": name, "prompt": "Once", "max_tokens": 1})
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        writer.write(asked)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        times.append((time.perf_counter() - began) * 1000)
    writer.close()
    return statistics.median(times)


def latency(way: Way, name: str, _: int = 0) -> float:
    """Return the median milliseconds of a request for one token."""
    return asyncio.run(_latency(way, name))


def socket_of(parent: Penstock) -> str:
    """Return the path of the Unix socket of the only loaded model."""
    [child] = psutil.Process(parent.process.pid).children()
    paths = [each.laddr for each in child.net_connections("unix") if str(each.laddr)]
    return min(map(str, paths), key=len)


def measure(options: Namespace, stack: ExitStack) -> Iterator[Table]:
    name = Path(options.model).name.removesuffix(".gguf")
    parent = stack.enter_context(Penstock(options.model, [OTHER, *FLAGS]))
    latency(parent.port, name)  # loads the model
    ways: dict[str, Way] = {"alone": socket_of(parent), "parent": parent.port}
    tokens = options.tokens
    throughput(parent.port, name, tokens)  # warms up
    speeds = {way: partial(throughput, at, name, tokens) for way, at in ways.items()}
    samples = in_turn(speeds, options.rounds)
    yield Table(samples, "tokens/s", ("alone",), [Bound("parent", "alone", 0.95)])
    times = {way: partial(latency, at, name) for way, at in ways.items()}
    samples = in_turn(times, options.rounds)
    pairs = zip(samples["parent"], samples["alone"], strict=True)
    added = statistics.median([through - alone for through, alone in pairs])
    notes = {"parent": f"{added:+.2f} ms, of at most {MOST_ADDED_MS:g} ms"}
    yield Table(samples, "ms a request", ("alone",), notes=notes)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument("--model", default="demo")


CASE = Case(__doc__, add_options, measure)
