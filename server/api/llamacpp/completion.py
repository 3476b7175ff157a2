"""POST /completion and /infill, as in llama.cpp's server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.llamacpp.bias import bias_by_token
from server.api.llamacpp.errors import own_errors
from server.api.llamacpp.progress import check_progress
from server.api.llamacpp.samplers import with_samplers
from server.api.llamacpp.schemas import CompletionBody, InfillBody
from server.api.llamacpp.writer import CompletionWriter
from server.api.openai.schemas.generate import MAX_BIASES
from server.api.receive import admit_and_read
from server.generation.infill import infill_prompts, with_infill_ends
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
from server.generation.prepare import prepare
from server.generation.prompts import encode_prompt, text_prompts
from server.generation.response import respond
from server.generation.sampling import BANNED
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/completion", openapi_extra=body_schema(CompletionBody, streams=True))
@router.post("/completions", include_in_schema=False)
async def completion(request: Request) -> Response:
    """Continue one or more prompts, as in llama.cpp's own API."""
    state = state_of(request)
    body = await admit_and_read(request, CompletionBody, "generate")
    options = await _options(state, body)
    size = len(await request.body())
    with own_errors(state):
        with state.client.reserve(request.state.tenant):
            prompts = await off_loop(size, lambda: [_ids(state, given) for given in body.prompts])
        return _answer(state, request, body, options, prompts)


@router.post("/infill", openapi_extra=body_schema(InfillBody, streams=True))
async def infill(request: Request) -> Response:
    """Return the text between two others, if the model has tokens for fill-in-the-middle."""
    state = state_of(request)
    body = await admit_and_read(request, InfillBody, "generate")
    options = with_infill_ends(state, await _options(state, body))
    before = body.input_prefix + body.prompt
    texts = infill_prompts(state, [before], body.input_suffix, param="input_suffix")
    with own_errors(state):
        with state.client.reserve(request.state.tenant):
            prompts = await text_prompts(state, texts)
        return _answer(state, request, body, options, prompts)


async def _options(state: AppState, body: CompletionBody) -> GenerationOptions:
    check_progress(state, body.return_progress)
    biases = body.logit_bias or []
    size = sum([len(name) for name, _ in biases])
    bias = await off_loop(size, lambda: bias_by_token(state.tokenizer, biases, MAX_BIASES))
    if body.ignore_eos:  # llama.cpp bans the end tokens; OpenAI's clients get them as text
        bias |= {str(token): BANNED for token in state.tokenizer.eos_token_ids}
    salt = body.cache_salt or ""
    if body.cache_prompt is False:  # a salt that no other request has finds nothing in the cache
        salt = secrets.token_hex(16)
    options = body.options(bias, salt)
    if body.samplers is None:
        return options
    return with_samplers(options, body.samplers, state.tokenizer.defaults)


def _ids(state: AppState, given: str | Sequence[int | str]) -> list[int]:
    """Return the token ids of a prompt. Special tokens are added to a text at its beginning."""
    if isinstance(given, str):
        return encode_prompt(state, given, "prompt") or state.tokenizer.document_start
    ids: list[int] = []
    for place, piece in enumerate(given):
        if isinstance(piece, str):
            ids += encode_prompt(state, piece, "prompt", add_special_tokens=place == 0)
        else:
            ids.append(piece)
    return ids


def _answer(
    state: AppState,
    request: Request,
    body: CompletionBody,
    options: GenerationOptions,
    prompts: list[list[int]],
) -> Response:
    prepared = prepare(state, request, options, prompts, param="prompt", ignored=body.ignored)
    return respond(state, prepared, CompletionWriter(state.tokenizer, prepared, body))
