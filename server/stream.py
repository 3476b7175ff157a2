"""A Generation as server-sent events, to the byte as OpenAI's clients expect them.

Order: one opening chunk for each choice in ascending index, text, one closing chunk for each
choice, usage where asked for, `[DONE]`. All chunks that are there at once go out in one send. A
failure after the 200 is a `data: {"error": …}` event and a body that never ends properly: an error
followed by `[DONE]` reads as an empty success to some clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from server.answer import Answer
from server.errors import ClientGone, StreamBroken, to_api_error
from server.generation import Choice

log = structlog.get_logger("server.stream")


class ChunkWriter:
    """Writes the chunks of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._dialect = answer, answer.dialect
        self._body = answer.generation.plan.body
        self._head = answer.head(answer.dialect.chunk)
        self._usage = {"usage": None} if self._body.include_usage else {}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head, "choices": choices, **self._usage, **more}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def opening(self) -> bytes:
        answer, dialect = self._answer, self._dialect
        events = b""
        for choice in answer.generation.choices:
            echo = answer.generation.plan.echoes[choice.prompt]
            payload = dialect.part(echo) if echo else dialect.opening
            ids = answer.prompt_ids(choice.prompt)
            if not dialect.prompt_ids_on_choice:
                events += self._event([answer.entry(choice, payload)], **({} if events else ids))
            elif payload or ids:
                events += self._event([answer.entry(choice, payload or dialect.part("")) | ids])
        return events

    def growth(self, choice: Choice) -> bytes:
        """What has come for a choice, and its closing chunk where it has finished."""
        delta, events = choice.take(), b""
        if delta.text or delta.scored or self._body.return_token_ids:
            events = self._event(
                [self._answer.entry(choice, self._dialect.part(delta.text), delta)]
            )
        if choice.finish is not None:
            closing = self._answer.entry(choice, self._dialect.closing, finish=choice.finish)
            events += self._event([closing])
        return events

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._body.include_usage:
            return done
        return self._event([], usage=self._answer.generation.usage()) + done


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


class TokenStream(EventSourceResponse):
    """The streamed response; closes its Generation however it ends."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._generation = answer, answer.generation
        config = answer.service.config
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache", **answer.headers()},
            ping=config.ping_interval,
            ping_message_factory=_ping,
            send_timeout=config.send_timeout,
            # Accepted streams go on while the server drains; who drains also ends the engine.
            shutdown_grace_period=config.drain_timeout + 10,
        )

    async def _events(self) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self._answer)
        try:
            if opening := writer.opening():
                yield opening
            async for choices in self._generation:
                if events := b"".join(map(writer.growth, choices)):
                    yield events
            yield writer.ending()
        except Exception as error:
            self._generation.close(error)
            draining = self._answer.service.client.state == "draining"
            failure = to_api_error(error, draining=draining)
            log.warning("stream broken", code=failure.code, exc_info=failure.status == 500)
            yield b"data: " + failure.body(self._generation.plan.request_id) + b"\n\n"
            raise StreamBroken from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError as error:
            self._generation.close(error)
            raise ClientGone from None
        finally:
            self._generation.close()
