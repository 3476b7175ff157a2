"""POST /tokenize and POST /detokenize, compatible with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.api.receive import encode, read_unqueued, thread_turn
from server.generation.chat_prompt import adds_special_tokens, chat_text, unread_arguments
from server.generation.limits import check_token_ids
from server.generation.off_loop import off_loop
from server.http.body import ignored_header
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a chat rendered by the chat template."""
    state = state_of(request)
    body = await read_unqueued(request, TokenizeBody)
    size = len(await request.body())
    async with thread_turn(state, size):
        chat = await off_loop(size, body.chat)
        text = body.prompt
        add = body.add_special_tokens is not False
        if text is None:
            text = await chat_text(state, chat)
            add = adds_special_tokens(state, chat)
        ids = await encode(state, text, add_special_tokens=add)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.max_length(),
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        async with thread_turn(state, len(ids)):
            answer["token_strs"] = await _token_texts(state, ids)
    return _json(answer, [*body.ignored, *unread_arguments(state, chat)])


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of a list of tokens."""
    state = state_of(request)
    body = await read_unqueued(request, DetokenizeBody)
    check_token_ids(state, body.tokens, "tokens")
    async with thread_turn(state, len(body.tokens)):
        text = await _decode(state, body.tokens)
    return _json({"prompt": text}, body.ignored)


async def _token_texts(state: AppState, ids: Sequence[int]) -> list[str]:
    token_text = state.tokenizer.token_text
    return await off_loop(len(ids), lambda: [token_text(token) for token in ids])


async def _decode(state: AppState, ids: list[int]) -> str:
    decode = state.tokenizer.decode
    return await off_loop(len(ids), lambda: decode(ids, skip_special_tokens=False))


def _json(answer: dict[str, Any], ignored: Sequence[str]) -> Response:
    headers = ignored_header(ignored)
    return Response(orjson.dumps(answer), media_type="application/json", headers=headers)
