"""Many clients that read slowly, send no request, or never finish their request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from server.cli.lifetime import KEEP_ALIVE_S
from tests.support.process import eventually
from tests.support.serve import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Record = Callable[[str, object], None]
MB = 2**20
SEND_TIMEOUT_S = 8
SLACK_S = 4  # on a busy machine
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def wire(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "Hello", "ignore_eos": True, "stream": True, **fields}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}".encode() + body


@contextlib.asynccontextmanager
async def connected(
    server: Server, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*server.address, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass
class Readers:
    """`clients` concurrent readers; each reads one stream after another."""

    server: Server
    clients: int = 16
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream

    async def _read(self, seed: int, until: float) -> None:
        while time.perf_counter() < until:
            async with connected(self.server) as (reader, writer):
                writer.write(wire(max_tokens=200, seed=seed))
                last = 0.0
                while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                    assert line, "the stream broke off"
                    if line.startswith(b"data: "):
                        now = time.perf_counter()
                        self.gaps += [now - last] * (last > 0)
                        last = now

    async def read_for(self, seconds: float) -> float:
        """Read for `seconds`; return the 99th percentile of the gaps in ms."""
        self.gaps.clear()
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._read(seed, until) for seed in range(self.clients)))
        return round(statistics.quantiles(self.gaps, n=100)[-1] * 1000, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--max-num-seqs", 64, "--send-timeout", SEND_TIMEOUT_S) as server:
        yield server


async def whole(server: Server, request: bytes, pause_s: float = 0) -> bytes:
    """Send a request and return the whole response; start to read after `pause_s`."""
    async with connected(server, limit=4096) as (reader, writer):
        writer.write(request)
        await asyncio.sleep(pause_s)
        body = bytearray()
        while not body.endswith(b"\r\n0\r\n\r\n"):
            body += (part := await reader.read(65536))
            assert part, "the answer broke off"
        return bytes(body)


async def one_byte_a_second(server: Server, request: bytes) -> None:
    """Send a request and read one byte of the response per second.

    TCP's receive buffer still takes in a few kilobytes.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        await loop.sock_sendall(sock, request)
        while await loop.sock_recv(sock, 1):  # noqa: ASYNC110 - the pace is the test
            await asyncio.sleep(1)


def connections(process: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))


def texts(body: bytes) -> dict[int, str]:
    """Return the text of each choice of a streamed response."""
    found: dict[int, str] = {}
    for line in body.replace(b"\r\n", b"\n").split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def test_reader_of_a_byte_a_second_slows_no_stream_and_is_cut_off(
    server: Server, record_property: Record
) -> None:
    """Compared with the same request read at full speed."""
    api, readers = psutil.Process(server.process.pid), Readers(server)
    many = wire(n=8, max_tokens=1000, seed=8)
    await readers.read_for(2)
    reading = asyncio.create_task(whole(server, many))
    usual = await readers.read_for(8)
    assert len(texts(await reading)) == 8
    before, began = api.memory_info().rss, time.monotonic()
    stalled = asyncio.create_task(one_byte_a_second(server, many))
    beside = await readers.read_for(8)
    grown = (api.memory_info().rss - before) / MB
    # If the kernel already holds the whole response, the kernel closes the connection.
    await asyncio.to_thread(
        eventually, lambda: not connections(api), "it is closed", SEND_TIMEOUT_S + SLACK_S
    )
    let_go = time.monotonic() - began
    stalled.cancel()
    for name, value in (("usual", usual), ("beside", beside), ("mb", grown), ("let_go_s", let_go)):
        record_property(name, value)
    print(f"\n99 % of gaps: {usual} ms, loaded {beside}; {grown:.1f} MB; gone in {let_go:.1f} s")
    assert beside < 2 * usual
    assert grown < 5
    assert let_go > SEND_TIMEOUT_S - 1
    server.wait_idle()


async def test_reader_that_pauses_for_seconds_reads_whole_stream(server: Server) -> None:
    """The pause is shorter than the send timeout."""
    many = wire(n=8, max_tokens=1000, seed=9)
    told, late = await asyncio.gather(
        whole(server, many), whole(server, many, pause_s=SEND_TIMEOUT_S - 2)
    )
    assert texts(told) == texts(late)
    assert sum(len(text) for text in texts(late).values()) > 8000


@pytest.fixture
def files() -> Iterator[int]:
    """Raise the limit of open files; return how many connections the test may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield min(hard, 10_500) - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def crowd(
    server: Server, count: int, say: bytes, hear: bytes = b""
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Open `count` connections and keep them open.

    Each one has sent `say` and, if `hear` is given, read a response up to and including `hear`.
    """
    gate = asyncio.Semaphore(64)
    async with contextlib.AsyncExitStack() as stack:

        async def one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            async with gate:
                reader, writer = await stack.enter_async_context(connected(server))
                writer.write(say)
                if hear:
                    await reader.readuntil(hear)
                return reader, writer

        yield await asyncio.gather(*(one() for _ in range(count)))


async def answered_within(server: Server, seconds: float) -> None:
    async with connected(server) as (reader, writer), asyncio.timeout(seconds):
        writer.write(HEALTH)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_thousands_of_idle_connections_use_little_memory_and_time(
    server: Server, files: int, record_property: Record
) -> None:
    """10,000 connections, or as many as the limit of open files allows."""
    api, readers = psutil.Process(server.process.pid), Readers(server, clients=200)
    usual = await readers.read_for(6)
    await asyncio.to_thread(eventually, lambda: not connections(api), "no client is connected")
    base, before = api.num_fds(), api.memory_info().rss
    async with crowd(server, files, HEALTH, b"}"):
        assert api.num_fds() >= base + files
        each = (api.memory_info().rss - before) / files / 1024
        reading = asyncio.create_task(readers.read_for(6))
        for _ in range(20):
            await answered_within(server, SLACK_S)
            await asyncio.sleep(0.25)
        beside = await reading
    await asyncio.to_thread(
        eventually, lambda: api.num_fds() <= base + 5, "all have been closed", 30
    )
    record_property("kb_a_connection", each)
    print(f"\n{files} idle: {each:.1f} KB each; 99 % of gaps: {usual} ms, with them {beside}")
    assert each < 100
    assert beside < 2 * usual
    assert "Traceback" not in server.log
    server.wait_idle()


async def test_unfinished_request_heads_are_closed_after_keep_alive(server: Server) -> None:
    """A thousand clients send one byte of a head every five seconds."""
    readers = Readers(server)
    usual = await readers.read_for(6)
    slow = asyncio.create_task(_drip(server))
    while not slow.done():
        assert await readers.read_for(6) < 2 * usual
        await answered_within(server, SLACK_S)
    first, last = await slow
    assert KEEP_ALIVE_S - 1 < first <= last < KEEP_ALIVE_S + SLACK_S


async def _drip(server: Server) -> tuple[float, float]:
    """Return the seconds after which the first and the last of 1000 connections were closed."""
    began, ends = time.monotonic(), []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(len(HEALTH) - 1):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 5)  # ends when the server closes it
                ends.append(time.monotonic() - began)
                return
            writer.write(HEALTH[number : number + 1])

    async with crowd(server, 1000, b"G") as all_of_them:
        await asyncio.gather(*(hold(*one) for one in all_of_them))
    return min(ends), max(ends)
