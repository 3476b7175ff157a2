"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol.generate import Ablation
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.writer import CompletionWriter
from server.api.receive import admit_and_read
from server.generation.chat_prompt import can_limit_thoughts
from server.generation.infill import infill_prompts, with_infill_ends
from server.generation.parsing import RAW_BUDGET, with_raw_thoughts
from server.generation.prepare import prepare
from server.generation.prompts import Prompts, make_echoes, text_prompts
from server.generation.response import respond
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody, streams=True))
async def completions(request: Request) -> Response:
    """Continuations of one or more prompts; choice `prompt * n + k` is the k-th of a prompt."""
    body = await admit_and_read(request, CompletionBody, "generate")
    return await complete(state_of(request), request, body)


async def complete(
    state: AppState, request: Request, body: CompletionBody, ablation: Ablation | None = None
) -> Response:
    """Return the response to a body that was admitted. Raises a 400 or 503 ApiError."""
    options = body.options()
    texts: Prompts = body.prompts
    if body.suffix:
        texts = infill_prompts(state, texts, body.suffix)
        options = with_infill_ends(state, options)
    echoes = None
    with state.client.reserve(request.state.tenant):
        prompts = await text_prompts(state, texts)
        if body.echo:
            echoes = await make_echoes(state, options, body.prompts)
    options = with_raw_thoughts(state, options, prompts)
    ignored = [*body.ignored]
    if body.thought_budget is not None and not can_limit_thoughts(state):
        ignored.append(RAW_BUDGET)
    prepared = prepare(
        state, request, options, prompts, param="prompt", echoes=echoes, ignored=ignored
    )
    if ablation is not None:
        prepared = replace(prepared, ablation=ablation)
    names_ids = state.config.return_tokens_as_token_ids
    writer = CompletionWriter(state.tokenizer, prepared, body, names_ids=names_ids)
    return respond(state, prepared, writer)
