"""A plan to its answer: one JSON object, or the chunks of a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.dialect import Dialect
from server.errors import ClientGone
from server.generation import Choice, Delta, Generation
from server.plan import Plan
from server.schemas.body import ignored_header
from server.service import Service

Result = TypeVar("Result")
# Clients that read an event by text lines would end it here; JSON may have them escaped.
LINE_SEPARATORS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]


async def attended(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` while the client is there: Starlette lets a handler run on after its client has
    gone. Raises ClientGone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Answer:
    """One answer as the client gets it; owns its Generation."""

    def __init__(self, service: Service, plan: Plan, dialect: Dialect) -> None:
        self.service, self._dialect, self._tokenizer = service, dialect, service.tokenizer
        self.generation, self._plan = Generation(service, plan), plan
        self._id = dialect.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._plan.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def headers(self) -> dict[str, str]:
        return ignored_header(self._plan.ignored)

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        wanted = self._plan.body.return_token_ids
        return {"prompt_token_ids": self._plan.prompts[prompt]} if wanted else {}

    def _entry(
        self,
        choice: Choice,
        payload: dict[str, Any],
        delta: Delta | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        """One of `choices`, whole or streamed; `delta` where it holds tokens."""
        body = self._plan.body
        entry = {"index": choice.index, **payload, "logprobs": None, "finish_reason": finish}
        if delta is not None and body.logprobs_wanted >= 0:
            entry["logprobs"] = self._dialect.logprobs(self._tokenizer, delta.scored)
        if delta is not None and body.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    async def whole(self, request: Request) -> Response:
        """Waits for everything; aborts where the client leaves first."""
        deltas = await attended(request, self.generation.collect())
        entries, echoes = [], self._plan.echoes
        for choice, delta in zip(self.generation.choices, deltas, strict=True):
            message = self._dialect.message(echoes[choice.prompt] + delta.text)
            entry = self._entry(choice, message, delta, choice.finish)
            if self._dialect.prompt_ids_on_choice:
                entry |= self._prompt_ids(choice.prompt)
            entries.append(entry)
        body = self._head(self._dialect.whole)
        body |= {"choices": entries, "usage": self.generation.usage()}
        if not self._dialect.prompt_ids_on_choice:
            body |= self._prompt_ids(0)
        return Response(orjson.dumps(body), media_type="application/json", headers=self.headers())

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One chunk of the stream."""
        usage = {"usage": None} if self._plan.body.include_usage else {}
        chunk = {**self._head(self._dialect.chunk), "choices": choices, **usage, **more}
        data = orjson.dumps(chunk)
        for separator, escape in LINE_SEPARATORS:
            data = data.replace(separator, escape)
        return b"data: " + data + b"\n\n"

    def opening(self) -> bytes:
        """The chunks before any text."""
        dialect, echoes = self._dialect, self._plan.echoes
        events = b""
        for choice in self.generation.choices:
            echo = echoes[choice.prompt]
            payload = dialect.part(echo) if echo else dialect.opening
            ids = self._prompt_ids(choice.prompt)
            if not dialect.prompt_ids_on_choice:
                events += self._event([self._entry(choice, payload)], **({} if events else ids))
            elif payload or ids:
                events += self._event([self._entry(choice, payload or dialect.part("")) | ids])
        return events

    def growth(self, choice: Choice) -> bytes:
        """What has come for a choice, and its closing chunk where it has finished."""
        delta, events = choice.take(), b""
        if delta.text or delta.scored or self._plan.body.return_token_ids:
            events = self._event([self._entry(choice, self._dialect.part(delta.text), delta)])
        if choice.finish is not None:
            closing = self._entry(choice, self._dialect.closing, finish=choice.finish)
            events += self._event([closing])
        return events

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._plan.body.include_usage:
            return done
        return self._event([], usage=self.generation.usage()) + done
