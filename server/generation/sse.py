"""A Generation as server-sent events, to the byte as OpenAI's clients expect them.

Order: in chats one opening chunk for each choice in ascending index, text (which begins with an
echo), one closing chunk for each choice, usage where asked for, `[DONE]`. All chunks that are there
at once go out together. A failure after the 200 is a `data: {"error": …}` event, the last of its
body: an error followed by `[DONE]` reads as an empty success to some clients, and where a body
breaks off, others and proxies forget the event they have not read yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import anyio
import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from server.api.openai.writer import Answer
from server.http.errors import ClientGone, StreamBroken

# The kernel ends a connection for good (listen.py); this clock is for systems where it does not.
AFTER_KERNEL_S = 5.0
PIECE = 65536  # bytes; asyncio holds up a writer that has more waiting, until 16 KiB are left

log = structlog.get_logger("server.stream")


class TokenStream(EventSourceResponse):
    """The streamed response; closes its Generation however it ends."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._generation = answer, answer.generation
        config = answer.state.config
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache", **answer.headers()},
            ping=config.ping_interval,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            # Accepted streams go on while the server drains; who drains also ends the engine.
            shutdown_grace_period=config.drain_timeout + 10,
        )

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if opening := self._answer.opening():
                yield opening
            async for choices in self._generation:
                if events := await self._answer.growth(choices):
                    yield events
            yield self._answer.ending()
        except Exception as error:
            self._generation.close(error)
            failure = self._answer.state.api_error(error)
            log.warning("stream broken", code=failure.code, exc_info=failure.status == 500)
            yield b"data: " + failure.body(self._generation.plan.request_id) + b"\n\n"
            raise StreamBroken from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, self._in_pieces(send))
        except SendTimeoutError as error:
            self._generation.close(error)
            raise ClientGone from None
        finally:
            stalled = "stalled" in scope["state"]  # as the connection ended it
            self._generation.close(SendTimeoutError() if stalled else None)

    def _in_pieces(self, send: Send) -> Send:
        """`send` with a clock for each piece: what has gathered for a slow reader may take long."""
        limit = self._answer.state.config.send_timeout + AFTER_KERNEL_S
        sending = asyncio.Lock()  # a ping between two pieces would break an event

        async def send_in_pieces(message: Message) -> None:
            async with sending:
                for piece in pieces(message):
                    with anyio.move_on_after(limit) as clock:
                        await send(piece)
                    if clock.cancelled_caught:
                        raise SendTimeoutError

        return send_in_pieces


def pieces(message: Message) -> Iterator[Message]:
    """A body in parts of at most PIECE bytes: whole events, where these are not longer."""
    body, start = message.get("body", b""), 0
    while len(body) - start > PIECE:
        end = body.rfind(b"\n\n", start, start + PIECE) + 2
        end = end if end > start + 1 else start + PIECE
        yield {**message, "body": body[start:end], "more_body": True}
        start = end
    yield {**message, "body": body[start:]} if start else message
