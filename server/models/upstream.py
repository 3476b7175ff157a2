"""HTTP/1.1 connections to the server of one model, over its Unix socket.

Only Penstock's own server is at the other end, so this client understands what that server sends:
a head, then a body with a Content-Length, with chunks, or none. It passes bodies on unchanged, and
reads no more than a reader takes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

HIGH_WATER = 256 << 10  # unread bytes of a body at which a connection stops reading
IDLE_S = 30.0  # a connection idle for longer is not used again; the server closes it after 75 s
NO_BODY = (204, 304)
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})

RawHeaders = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]


class ConnectionLost(Exception):
    """The other end closed the connection before the end of its answer."""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer; `headers` lacks those of the connection."""

    status: int
    headers: RawHeaders
    length: int | None  # of the body in bytes; None: it comes in chunks
    is_closing: bool  # the connection ends with this answer


def parse_head(data: bytes) -> Head:
    """Return the head of an answer. `data` ends before the empty line."""
    first, *lines = data.split(b"\r\n")
    status = int(first.split(b" ", 2)[1])
    headers: RawHeaders = []
    length: int | None = 0
    is_closing = False
    for line in lines:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            length = None
        elif name == b"connection":
            is_closing = value.lower() == b"close"
        if name not in HOP_BY_HOP:
            headers.append((name, value))
    if status in NO_BODY:
        length = 0
    return Head(status, headers, length, is_closing)


class Chunks:
    """Reads a chunked body (RFC 9112, section 7.1). Only whole chunks come out.

    The server writes whole events in each chunk, so a connection that breaks never leaves a part
    of an event behind.
    """

    def __init__(self) -> None:
        self._left = bytearray()
        self.is_complete = False
        self.is_raw = False  # chunks come out with their framing, without the last, empty one

    def feed(self, data: bytes) -> bytes:
        """Return the content of the chunks that `data` completes."""
        buffer = self._left
        buffer += data
        found = []
        start = 0
        while True:
            end = buffer.find(b"\r\n", start)
            if end < 0:
                break
            size = int(buffer[start:end].partition(b";")[0], 16)
            after = end + 2 + size
            if len(buffer) < after + 2:
                break
            if size == 0:
                self.is_complete = True
                break
            found.append(
                bytes(buffer[start : after + 2] if self.is_raw else buffer[end + 2 : after])
            )
            start = after + 2
        del buffer[:start]
        return b"".join(found)


class Connection(asyncio.Protocol):
    """One connection, which serves one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.was_used = False  # a request has been answered on it
        self._transport: asyncio.Transport | None = None
        self._wake: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin(has_body=True)

    def _begin(self, *, has_body: bool) -> None:
        self._has_body = has_body
        self._buffer = bytearray()  # of the head, until it is complete
        self._head: Head | None = None
        self._chunks: Chunks | None = None
        self._missing = 0  # bytes of a body with a length
        self._parts: list[bytes] = []
        self._unread = 0
        self._is_done = False
        self._sink: Sink | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_answered(self) -> bool:
        """Whether the head of an answer has come."""
        return self._head is not None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            data = bytes(self._buffer[end + 4 :])
            self._start_body(parse_head(bytes(self._buffer[:end])))
        if data and not self._is_done:
            self._add(data)
        if self._sink is None or self._is_done:
            self._notify()

    def _start_body(self, head: Head) -> None:
        self._head = head
        if not self._has_body:
            self._is_done = True
        elif head.length is None:
            self._chunks = Chunks()
        else:
            self._missing = head.length
            self._is_done = head.length == 0

    def _add(self, data: bytes) -> None:
        if self._chunks is not None:
            data = self._chunks.feed(data)
            self._is_done = self._chunks.is_complete
        else:
            self._missing -= len(data)
            self._is_done = self._missing <= 0
        if data and self._sink is not None:
            self._sink(data)
        elif data:
            self._parts.append(data)
            self._unread += len(data)
            if self._unread > HIGH_WATER and self._transport is not None:
                self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        self._notify()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    # Called for a request.

    def begin(self, head: bytes, *, has_body: bool) -> None:
        """Send the head of a request, perhaps with its body. `has_body` is False for HEAD."""
        self._begin(has_body=has_body)
        self.send(head)

    def send(self, data: bytes) -> None:
        """Send a part of the request. Raises ConnectionLost."""
        if self._transport is None:
            raise ConnectionLost
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the kernel has taken most of what was sent."""
        await self._writable.wait()

    async def head(self) -> Head:
        """Return the head of the answer. Raises ConnectionLost."""
        while self._head is None:
            if self._transport is None:
                raise ConnectionLost
            await self._wait()
        return self._head

    async def body(self) -> tuple[bytes, bool]:
        """Return the next bytes of the body, and whether more follow. Raises ConnectionLost."""
        while not self._parts and not self._is_done:
            if self._transport is None:
                raise ConnectionLost
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._transport is not None:
            self._transport.resume_reading()
        return data, not self._is_done

    async def pour(self, sink: Sink) -> None:
        """Give the chunks of the rest of the body to `sink`, framed as they came.

        They go there as they arrive, without a task in between. The last, empty chunk is left out.
        Raises ConnectionLost.
        """
        assert self._chunks is not None
        assert not self._parts
        self._chunks.is_raw = True
        self._sink = sink
        try:
            while not self._is_done:
                if self._transport is None:
                    raise ConnectionLost
                await self._wait()
        finally:
            self._sink = None

    def pause(self) -> None:
        """Read no more of the body until `resume`."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow: the answer is complete, and the other end stays."""
        return (
            self.is_open
            and self._is_done
            and self._head is not None
            and not (self._head.is_closing)
        )

    def close(self) -> None:
        """Close at once. The server aborts a request that it still answers."""
        if self._transport is not None:
            self._transport.abort()


class Upstream:
    """The server at one Unix socket, and the connections to it that are kept open."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: collections.deque[Connection] = collections.deque()

    async def connect(self, *, fresh: bool = False) -> Connection:
        """Return a connection, a new one if `fresh`. Raises OSError if nothing listens."""
        loop = asyncio.get_running_loop()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_open and loop.time() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        _, connection = await loop.create_unix_connection(Connection, self._path)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request if it allows one, else close it."""
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            connection.was_used = True
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
        """Return the body of a GET. Raises ConnectionLost, also if the status is not 200."""
        with contextlib.suppress(OSError):
            connection = await self.connect()
            try:
                connection.begin(request_head("GET", path.encode(), list(headers)), has_body=True)
                head = await connection.head()
                body = bytearray()
                more = True
                while more:
                    part, more = await connection.body()
                    body += part
            finally:
                self.give_back(connection)
            if head.status == 200:
                return bytes(body)
        raise ConnectionLost


def request_head(method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a request's head. `headers` may not set Host."""
    lines = [b"%b %b HTTP/1.1\r\nhost: localhost\r\n" % (method.encode(), target)]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines.append(b"\r\n")
    return b"".join(lines)
