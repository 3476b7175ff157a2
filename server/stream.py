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
    """Writes the chunks of one answer around parts that are encoded once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._dialect = answer.dialect
        self._body = answer.generation.plan.body
        head = orjson.dumps(answer.head(answer.dialect.chunk))
        self._head = b"data: " + head[:-1] + b","
        self._usage_null = b',"usage":null' if self._body.include_usage else b""

    def chunk(
        self,
        index: int,
        payload: bytes,
        *,
        logprobs: bytes = b"null",
        finish: bytes = b"null",
        more: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
    ) -> bytes:
        """One event; `more` goes into the choice, `top` beside the choices."""
        return b'%b"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._head,
            index,
            payload,
            logprobs,
            finish,
            _fields(more),
            self._usage_null,
            _fields(top),
        )

    def opening(self) -> bytes:
        answer, dialect = self._answer, self._dialect
        events = []
        for choice in answer.generation.choices:
            echo = answer.generation.plan.echoes[choice.prompt]
            payload = self._text(echo) if echo else dialect.opening
            ids = answer.prompt_ids(choice.prompt)
            if dialect.prompt_ids_on_choice:
                if payload or ids:
                    events.append(self.chunk(choice.index, payload or self._text(""), more=ids))
            else:
                events.append(self.chunk(choice.index, payload, top=None if events else ids))
        return b"".join(events)

    def growth(self, choice: Choice) -> bytes:
        """What has come for a choice, and its closing chunk where it has finished."""
        delta, event = choice.take(), b""
        wants_ids, wants_logprobs = self._body.return_token_ids, self._body.logprobs_wanted >= 0
        if delta.text or wants_ids or (wants_logprobs and delta.scored):
            logprobs = b"null"
            if wants_logprobs:
                logprobs = orjson.dumps(
                    self._dialect.logprobs(self._answer.tokenizer, delta.scored)
                )
            more = {"token_ids": delta.token_ids} if wants_ids else None
            event = self.chunk(choice.index, self._text(delta.text), logprobs=logprobs, more=more)
        if choice.finish is not None:
            finish = orjson.dumps(choice.finish)
            event += self.chunk(choice.index, self._dialect.closing, finish=finish)
        return event

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._body.include_usage:
            return done
        usage = orjson.dumps(self._answer.generation.usage())
        return b'%b"choices":[],"usage":%b}\n\n%b' % (self._head, usage, done)

    def _text(self, text: str) -> bytes:
        before, after = self._dialect.text
        return before + orjson.dumps(text) + after


def _fields(extra: dict[str, Any] | None) -> bytes:
    return b"," + orjson.dumps(extra)[1:-1] if extra else b""


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
