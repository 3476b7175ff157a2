"""A client that measures requests to an OpenAI-compatible server with little overhead.

`Exchange` is one request and its response, without IO. The functions below drive it with asyncio or
with blocking sockets (for locust's users). Every request opens its own connection, as a new client
would. A load balancer can therefore distribute the requests, and connecting is part of the measured
time.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import h11
import msgspec
import orjson

from loadtest.errors import BenchError

PATH_CHARACTERS = "/%:@!$&'()*+,;=~"  # allowed in a path (RFC 3986); % because it may be quoted
REJECTIONS = (429, 503)  # the server reports that it is full; not a failure
Kind = Literal["", "rejected", "refused", "cut off", "timeout", "no connection", "not HTTP"]


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server; `prefix` is the part of its paths before /v1."""

    host: str
    port: int
    tls: bool
    prefix: str
    key: str = ""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Target:
        """Parse a URL with or without a trailing /v1. Raises BenchError if it is invalid."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, host = parts.port, (parts.hostname or "").encode("idna").decode()
        except ValueError as error:
            raise BenchError(f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise BenchError(f"{url} is not an HTTP URL; give one like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        path = quote(parts.path, safe=PATH_CHARACTERS, errors="surrogateescape")
        prefix = path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, prefix, key)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one streamed request; times are seconds of CLOCK_MONOTONIC."""

    started: float
    ended: float
    arrivals: tuple[float, ...]  # one for each event with text
    tokens: int  # from the usage event; without one, the number of events with text
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, if the server reports it
    error: Kind = ""  # empty if the response is complete
    status: int = 0  # 0 if there was no response
    message: str = ""  # the error message of the server or the system

    @property
    def gaps(self) -> list[float]:
        """The times between events; several tokens in one event give fewer and longer gaps."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Text = msgspec.field(default_factory=_Text)
    text: str | None = None

    @property
    def carries_text(self) -> bool:
        delta = self.delta
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Exchange:
    """One request and its response.

    Send the bytes of `request`, then pass received bytes to `receive` until `done`. Pass b"" when
    the connection is closed.
    """

    def __init__(self, target: Target, path: str, body: dict[str, Any] | None) -> None:
        self.started = time.monotonic()
        self.done = False
        self.status = 0
        self.error: Kind = ""
        self.message = ""
        self._http = h11.Connection(h11.CLIENT)
        self._target, self._path, self._body = target, path, body
        self._rest = b""  # the start of an incomplete event, or a body that is not a stream
        self._arrivals: list[float] = []
        self._usage: _Usage | None = None
        self._said_done = False
        self._streams = False

    def request(self) -> bytes:
        target = self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        payload = b"" if self._body is None else orjson.dumps(self._body)
        headers = [("Host", f"{host}:{target.port}"), ("Connection", "close")]
        if target.key:
            headers.append(("Authorization", f"Bearer {target.key}"))
        if payload:
            headers.append(("Content-Type", "application/json"))
            headers.append(("Content-Length", str(len(payload))))
        method = "POST" if payload else "GET"
        head = h11.Request(method=method, target=target.prefix + self._path, headers=headers)
        parts = [self._http.send(head)]
        if payload:
            parts.append(self._http.send(h11.Data(payload)))
        parts.append(self._http.send(h11.EndOfMessage()))
        return b"".join(part or b"" for part in parts)

    def receive(self, data: bytes) -> None:
        at = time.monotonic()
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                    kinds = [value for name, value in event.headers if name == b"content-type"]
                    self._streams = any(b"text/event-stream" in kind for kind in kinds)
                elif isinstance(event, h11.Data):
                    self._take(bytes(event.data), at)
                elif not isinstance(event, h11.InformationalResponse):
                    return self._finish()
        except h11.RemoteProtocolError as error:
            if not (data or self.status):  # h11's message would name its internal states
                self.fail("cut off", "the connection was closed before a response arrived")
            else:
                self.fail("cut off" if self.status else "not HTTP", str(error))

    def fail(self, error: Kind, message: str) -> None:
        self.error, self.message, self.done = error, message, True

    def went_wrong(self, error: OSError, limit_s: float) -> None:
        """Record an error of the connection; TimeoutError is an OSError, too."""
        if isinstance(error, TimeoutError):
            self.fail("timeout", f"incomplete after {limit_s:g} s")
        else:
            self.fail("cut off" if self.status else "no connection", str(error))

    @property
    def events(self) -> int:
        """The number of events with text so far."""
        return len(self._arrivals)

    @property
    def body(self) -> bytes:
        """The body of a response that is not a stream."""
        return self._rest

    def completion(self) -> Completion:
        usage, cached = self._usage or _Usage(), None
        if usage.prompt_tokens_details:
            cached = usage.prompt_tokens_details.cached_tokens
        return Completion(
            started=self.started,
            ended=time.monotonic(),
            arrivals=tuple(self._arrivals),
            tokens=usage.completion_tokens or len(self._arrivals),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached or 0,
            error=self.error,
            status=self.status,
            message=self.message,
        )

    def _take(self, data: bytes, at: float) -> None:
        if not self._streams:
            self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self._said_done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.fail("cut off", f"an event does not match OpenAI's API: {error}")
            return
        if event.error is not None:
            self.fail("cut off", said(data))
        if any(choice.carries_text for choice in event.choices):
            self._arrivals.append(at)
        self._usage = event.usage or self._usage

    def _finish(self) -> None:
        self.done = True
        if self.error:
            return
        if self.status in REJECTIONS:
            self.fail("rejected", said(self._rest))
        elif self.status != 200:
            self.fail("refused", said(self._rest))
        elif self._streams and not self._said_done:
            self.fail("cut off", "the stream ended without [DONE]")


def said(body: bytes) -> str:
    """Return the message of an error body, or the start of a body in another format."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


async def exchange(
    target: Target, path: str, body: dict[str, Any] | None, limit_s: float
) -> Exchange:
    """Run an exchange to its end. Errors are stored in it and not raised."""
    this = Exchange(target, path, body)
    try:
        async with asyncio.timeout(limit_s):
            await drive(this, target)
    except OSError as error:
        this.went_wrong(error, limit_s)
    return this


@functools.cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # loading the system's certificates takes 20 ms


async def drive(this: Exchange, target: Target) -> None:
    """Run an exchange to its end. Raises OSError if the connection fails."""
    tls = tls_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    try:
        writer.write(this.request())
        while not this.done:
            this.receive(await reader.read(65536))
    finally:
        writer.close()


async def stream(
    target: Target, path: str, body: dict[str, Any], limit_s: float = 300
) -> Completion:
    """POST `body` as a streaming request and return its result, also if it failed."""
    return (await exchange(target, path, streamed(body), limit_s)).completion()


def stream_blocking(
    target: Target, path: str, body: dict[str, Any], limit_s: float = 300
) -> Completion:
    """Like `stream`, over a blocking socket, for threads and gevent's greenlets."""
    this = Exchange(target, path, streamed(body))
    try:
        with socket.create_connection((target.host, target.port), timeout=limit_s) as plain:
            connection = plain
            if target.tls:
                connection = tls_context().wrap_socket(plain, server_hostname=target.host)
            connection.sendall(this.request())
            while not this.done:
                left = limit_s - (time.monotonic() - this.started)
                connection.settimeout(max(left, 0.001))
                this.receive(connection.recv(65536))
    except OSError as error:
        this.went_wrong(error, limit_s)
    return this.completion()


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


async def closed_loop(
    address: str, path: str, bodies: Iterable[dict[str, Any]], clients: int
) -> tuple[float, list[Completion]]:
    """POST all bodies from `clients` concurrent clients; return (wall seconds, completions).

    Raises RuntimeError with the server's message if a response is incomplete.
    """
    target, queue = Target.parse(address), iter(bodies)
    done: list[Completion] = []

    async def client() -> None:
        for body in queue:
            completion = (await exchange(target, path, body, limit_s=300)).completion()
            if completion.error:
                raise RuntimeError(f"{completion.error}: {completion.message}")
            done.append(completion)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.monotonic() - began, done
