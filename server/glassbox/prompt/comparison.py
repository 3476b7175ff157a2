"""Comparison: which cached tokens of another prompt a prompt cannot use, and why.

It is what /v1/responses and /v1/messages say about the prompt of a request.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints, model_validator
from starlette.requests import Request

from server.api.openai.schemas.tokenize import TokenizeBody
from server.api.openai.tokenize import prompt_text
from server.api.prefixes.difference import Difference, RenderedPrompt
from server.api.prefixes.inspection import compare, find_prompt, prompt_log_of
from server.api.prefixes.record import PromptRecord, prompt_record
from server.api.receive import encode, thread_turn
from server.generation.cache_salt import cache_salt_of
from server.http.body import failure
from server.state import state_of


class PromptBody(TokenizeBody):
    baseline: TokenizeBody | None = None
    """Another prompt to compare with."""
    comparison_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The id of a response or message whose prompt is compared."""

    @model_validator(mode="after")
    def _one_comparison(self) -> PromptBody:
        if self.baseline is not None and self.comparison_id is not None:
            raise failure("invalid", "cannot be given with baseline", "comparison_id")
        return self


async def comparison(
    request: Request, body: PromptBody, prompt: RenderedPrompt, ids: list[int]
) -> dict[str, Any] | None:
    """Return the comparison that the body asks for, or None; `ids` are the tokens of the prompt."""
    if body.comparison_id is not None:
        log, tenant = prompt_log_of(request), request.state.tenant
        earlier = find_prompt(log, tenant, body.comparison_id)
    elif body.baseline is not None:
        earlier = await _record(request, body.baseline)
    else:
        return None
    found = await compare(state_of(request), prompt, ids, cache_salt_of(request), earlier)
    if not isinstance(found, Difference):
        return {"type": found}
    return {
        "type": "miss",
        **found.where(lambda index: f"messages.{index}"),
        "reusable_tokens": found.reusable_tokens,
        "lost_tokens": found.lost_tokens,
    }


async def _record(request: Request, body: TokenizeBody) -> PromptRecord:
    state = state_of(request)
    size = len(await request.body())
    async with thread_turn(request, size):
        chat, text, add = await prompt_text(request, body, size)
        ids = await encode(state, text, add_special_tokens=add)
    return prompt_record(chat, ids, state.loaded().block_size, cache_salt_of(request), adapter=0)
