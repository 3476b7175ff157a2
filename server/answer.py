"""A plan to its answer: the whole JSON object, or the state of a stream."""

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
from server.service import Service

Result = TypeVar("Result")


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
    """What the whole and the streamed form of one answer have in common."""

    def __init__(self, service: Service, plan: Plan, dialect: Dialect) -> None:
        self.service, self.dialect, self._tokenizer = service, dialect, service.tokenizer
        self.generation = Generation(service, plan)
        self._id = dialect.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        model = self.generation.plan.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def headers(self) -> dict[str, str]:
        ignored = self.generation.plan.ignored
        return {"x-ignored-params": ", ".join(ignored)} if ignored else {}

    def prompt_ids(self, prompt: int) -> dict[str, Any]:
        plan = self.generation.plan
        return {"prompt_token_ids": plan.prompts[prompt]} if plan.body.return_token_ids else {}

    def entry(
        self,
        choice: Choice,
        payload: dict[str, Any],
        delta: Delta | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        """One of `choices`, whole or streamed; `delta` where it holds tokens."""
        body = self.generation.plan.body
        entry = {"index": choice.index, **payload, "logprobs": None, "finish_reason": finish}
        if delta is not None and body.logprobs_wanted >= 0:
            entry["logprobs"] = self.dialect.logprobs(self._tokenizer, delta.scored)
        if delta is not None and body.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    async def whole(self, request: Request) -> Response:
        """Waits for everything; aborts where the client leaves first."""
        deltas = await attended(request, self.generation.collect())
        entries, echoes = [], self.generation.plan.echoes
        for choice, delta in zip(self.generation.choices, deltas, strict=True):
            message = self.dialect.message(echoes[choice.prompt] + delta.text)
            entry = self.entry(choice, message, delta, choice.finish)
            if self.dialect.prompt_ids_on_choice:
                entry |= self.prompt_ids(choice.prompt)
            entries.append(entry)
        body = self.head(self.dialect.whole)
        body |= {"choices": entries, "usage": self.generation.usage()}
        if not self.dialect.prompt_ids_on_choice:
            body |= self.prompt_ids(0)
        return Response(orjson.dumps(body), media_type="application/json", headers=self.headers())
