"""A generation as a stream of server-sent events, byte for byte as OpenAI's clients expect it.

All chunks that are ready go out together. A failure after the status was sent becomes an error
event, the last of its body. An error followed by `[DONE]` would look like an empty success to some
clients. If the body broke off instead, other clients and proxies would lose the events that they
have not read yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import structlog
from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from server.generation.events import ChoiceEvents
from server.generation.generation import Generation
from server.generation.writer import Writer, format_events
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import ClientStalled, StreamBroken
from server.state import AppState

# The kernel disconnects a client that stops reading (http/listener.py). This clock is for systems
# whose kernel does not.
AFTER_KERNEL_S = 5.0
PIECE = 65536  # bytes; asyncio stops a writer with more unsent bytes until only 16 KiB are left
PINGS = (b":", b" ")  # how the bytes of a ping begin: as a comment, or with white space before JSON
# Clients that split a stream into text lines would split an event here. JSON can escape them.
LINE_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]

log = structlog.get_logger("server.stream")


def escaped(data: bytes) -> bytes:
    """Return a JSON text without characters that end a line for some clients."""
    if data.isascii():
        return data
    for separator, escape in LINE_SEPARATORS:
        data = data.replace(separator, escape)
    return data


def sse_event(data: bytes, name: str | None = None) -> bytes:
    """Return a server-sent event whose data is a JSON text; `name` is its type."""
    line = b"data: " + escaped(data) + b"\n\n"
    if name is None:
        return line
    return b"event: " + name.encode() + b"\n" + line


class StreamedResponse(EventSourceResponse):
    """A response that sends the events of a generation as they come."""

    def __init__(self, state: AppState, generation: Generation, writer: Writer) -> None:
        self._state = state
        self._generation = generation
        self._writer = writer
        options = generation.prepared.options
        self._may_be_long = max(options.num_logprobs, options.num_prompt_logprobs) >= 0
        config = state.config
        super().__init__(
            self._body(),
            headers={"cache-control": "no-cache", **generation.prepared.notes},
            ping=config.ping_interval,
            ping_message_factory=writer.ping,  # type: ignore[arg-type]  # bytes are sent as they are
            # Accepted streams continue while the server drains. The drain then ends the engine.
            shutdown_grace_period=config.drain_timeout + 10,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation while its events are sent; end a failed stream with an error event."""
        send = TimedSend(send, self._state.config.send_timeout + AFTER_KERNEL_S)
        try:
            with self._generation, send:
                await self._stream(scope, receive, send)
        except StreamBroken as broken:
            await cancel_on_disconnect(receive, self._send_failure(broken.error, send))
            raise

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An error before the first output still gets a status. Wait no longer than for a ping,
        # except for a grammar, which the engine may refuse after compiling it.
        options, limit = self._generation.prepared.options, self._state.config.ping_interval
        first = self._generation.wait_for_output(None if options.grammar else limit)
        await cancel_on_disconnect(receive, first)
        await super().__call__(scope, receive, send)
        if "stalled" in scope["state"]:  # set by Connection
            raise ClientStalled

    async def _body(self) -> AsyncIterator[bytes]:
        """Yield the body of the stream in parts. Raises StreamBroken from any error."""
        try:
            opening = self._writer.opening()
            if opening:
                yield opening
            async for updates in self._generation:
                chunks = await self._formatted(updates)
                if chunks:
                    yield chunks
            yield self._writer.closing(self._generation.final_usage())
        except Exception as error:
            raise StreamBroken(error) from error

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # TimedSend has one timer for the stream. The library's timer for each message would take
        # longer than all the rest of the message.
        await send(message)

    async def _formatted(self, updates: Sequence[ChoiceEvents]) -> bytes:
        def write() -> bytes:
            return b"".join([self._writer.chunks(update) for update in updates])

        if not self._may_be_long:
            return write()
        return await format_events(self._generation.prepared.options, updates, write)

    async def _send_failure(self, error: Exception, send: Send) -> None:
        """Send the last event of a stream that `error` has ended."""
        failure = self._state.api_error(error)
        cause = None
        if failure.status == 500:  # a fault of this program
            cause = error
        log.warning("stream broken", code=failure.code, exc_info=cause)
        event = self._writer.failure(failure)
        await send({"type": "http.response.body", "body": event, "more_body": True})


class TimedSend:
    """A `send` that splits bodies, and raises ClientStalled if a piece takes too long.

    `limit` is in seconds. A slow client may need longer for a whole body than for one piece. Use it
    as a context manager: one timer looks at all sends of the response.
    """

    def __init__(self, send: Send, limit: float) -> None:
        self._send = send
        self._limit = limit
        self._owner: asyncio.Task[None] | None = None  # that sends all but the pings
        self._task: asyncio.Task[None] | None = None  # the owner, while it sends
        self._piece = 0  # number of the piece that is sent now
        self._seen = -1  # at the timer's last look
        self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._look()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if body.startswith(PINGS):
            await self._send_ping(message)
            return
        if self._owner is None:  # Python 3.11 takes a microsecond to find the current task
            self._owner = asyncio.current_task()
        self._task = self._owner
        try:
            if len(body) <= PIECE:
                self._piece += 1
                await self._send(message)
            else:
                await self._send_pieces(message)
        except asyncio.CancelledError:
            if self._is_stalled:
                raise ClientStalled from None
            raise
        finally:
            self._task = None

    async def _send_pieces(self, message: Message) -> None:
        for piece in pieces(message):
            self._piece += 1
            await self._send(piece)

    async def _send_ping(self, message: Message) -> None:
        """Send a ping, unless a body is on its way: between two pieces it would break an event."""
        if self._task is None:
            await self._send(message)

    def _look(self) -> None:
        """Cancel a send that has lasted since the last look."""
        if self._task is not None and self._piece == self._seen:
            self._is_stalled = True
            self._task.cancel()
            return
        self._seen = self._piece
        self._timer = asyncio.get_running_loop().call_later(self._limit, self._look)


def pieces(message: Message) -> Iterator[Message]:
    """Split a body into pieces of at most PIECE bytes, between events if these fit."""
    body = message["body"]
    start = 0
    while len(body) - start > PIECE:
        end = body.rfind(b"\n\n", start, start + PIECE) + 2
        if end <= start + 1:  # no event ends here
            end = start + PIECE
        yield {**message, "body": body[start:end], "more_body": True}
        start = end
    if start:
        message = {**message, "body": body[start:]}
    yield message
