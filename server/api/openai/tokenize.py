"""POST /tokenize and POST /detokenize, compatible with vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.generation.off_loop import INLINE_CHARS, off_loop
from server.generation.prepare import chat_prompt, check_token_ids, unread_arguments
from server.http.body import ignored_header, read_body
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a chat rendered by the chat template."""
    state = state_of(request)
    state.loaded()
    body = await read_body(request, TokenizeBody, state.large_bodies)
    state.model_name(body.model)
    encode, token_text = state.tokenizer.encode, state.tokenizer.token_text
    size = len(await request.body())
    async with _turn(state, size):
        if (text := body.prompt) is None:
            ids = await chat_prompt(state, body, size)
        else:
            add = body.add_special_tokens is not False
            ids = await off_loop(len(text), lambda: encode(text, add_special_tokens=add))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.max_length(),
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        async with _turn(state, len(ids)):
            answer["token_strs"] = await off_loop(len(ids), lambda: [token_text(i) for i in ids])
    return _json(answer, [*body.ignored, *unread_arguments(state, body)])


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of a list of tokens."""
    state = state_of(request)
    state.loaded()
    body = await read_body(request, DetokenizeBody, state.large_bodies)
    state.model_name(body.model)
    check_token_ids(state, body.tokens, "tokens")
    ids, decode = body.tokens, state.tokenizer.decode
    async with _turn(state, len(ids)):
        text = await off_loop(len(ids), lambda: decode(ids, skip_special_tokens=False))
    return _json({"prompt": text}, body.ignored)


def _turn(state: AppState, size: int) -> AbstractAsyncContextManager[None]:
    """Return a context that limits how many of these requests use a thread at once.

    No queue bounds them. `off_loop` uses a thread if `size` is at least INLINE_CHARS.
    """
    return state.spare_threads if size >= INLINE_CHARS else contextlib.nullcontext()


def _json(answer: dict[str, Any], ignored: Sequence[str]) -> Response:
    headers = ignored_header(ignored)
    return Response(orjson.dumps(answer), media_type="application/json", headers=headers)
