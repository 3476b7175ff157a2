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
        self.service, self.dialect, self.tokenizer = service, dialect, service.tokenizer
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

    async def whole(self, request: Request) -> Response:
        """Waits for everything; aborts where the client leaves first."""
        deltas = await attended(request, self.generation.collect())
        choices = zip(self.generation.choices, deltas, strict=True)
        body = self.head(self.dialect.whole) | {
            "choices": [self._choice(choice, delta) for choice, delta in choices],
            "usage": self.generation.usage(),
        }
        if not self.dialect.prompt_ids_on_choice:
            body |= self.prompt_ids(0)
        return Response(orjson.dumps(body), media_type="application/json", headers=self.headers())

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        plan = self.generation.plan
        logprobs = None
        if plan.body.logprobs_wanted >= 0:
            logprobs = self.dialect.logprobs(self.tokenizer, delta.scored)
        body = {
            "index": choice.index,
            **self.dialect.message(plan.echoes[choice.prompt] + delta.text),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
        if self.dialect.prompt_ids_on_choice:
            body |= self.prompt_ids(choice.prompt)
        if plan.body.return_token_ids:
            body["token_ids"] = delta.token_ids
        return body
