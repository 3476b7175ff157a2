"""GET /props and /slots, and POST /apply-template, as in llama.cpp's server."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.llamacpp.samplers import RENAMED
from server.api.llamacpp.template_values import own_chat
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.sampling_fields import SAMPLING_DEFAULTS
from server.api.receive import encode, read_unqueued, thread_turn
from server.generation.chat_prompt import (
    Chat,
    adds_special_tokens,
    chat_text,
    unread_arguments,
    with_images,
)
from server.generation.off_loop import off_loop
from server.generation.parsing import check_tool_choice
from server.generation.sampling import check_option_tokens
from server.http.body import ignored_header
from server.http.openapi import body_schema
from server.state import VERSION, state_of

router = APIRouter()
RANDOM = -1  # as a seed


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """Return the defaults of sampling, the context, and the chat template."""
    state = state_of(request)
    info = state.loaded()
    sampling = SAMPLING_DEFAULTS | state.tokenizer.defaults
    params = {RENAMED.get(name, name): sampling[name] for name in SAMPLING_DEFAULTS}
    params["seed"] = RANDOM if state.config.seed is None else state.config.seed
    special = state.tokenizer.special_tokens
    return {
        "default_generation_settings": {"params": params, "n_ctx": state.max_length()},
        "total_slots": info.max_num_seqs,
        "model_alias": state.names[0],
        "modalities": {"vision": False, "audio": False},
        "chat_template": state.template.source if state.template else "",
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "build_info": VERSION,
    }


@router.get("/slots")
async def slots(request: Request) -> list[dict[str, Any]]:
    """Return an entry for each sequence that one step may have; the running ones come first."""
    state = state_of(request)
    info = state.loaded()
    running = state.client.stats.running
    context = state.max_length()
    return [
        {"id": index, "n_ctx": context, "is_processing": index < running}
        for index in range(info.max_num_seqs)
    ]


@router.post("/apply-template", openapi_extra=body_schema(ChatBody))
async def apply_template(request: Request) -> Response:
    """Return the text of the prompt that a chat becomes."""
    body, chat, text = await _rendered(request, is_own=True)
    return _json(request, {"prompt": text}, body, chat)


@router.post("/v1/chat/completions/input_tokens", openapi_extra=body_schema(ChatBody))
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def input_tokens(request: Request) -> Response:
    """Return the number of tokens of the prompt that a chat becomes."""
    state = state_of(request)
    is_own = not request.url.path.startswith("/v1/")
    body, chat, text = await _rendered(request, is_own=is_own)
    async with thread_turn(request, len(text)):
        ids = await encode(state, text, add_special_tokens=adds_special_tokens(state, chat))
    counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
    return _json(request, counted, body, chat)


async def _rendered(request: Request, *, is_own: bool) -> tuple[ChatBody, Chat, str]:
    """Return the body, the chat, and the text of its prompt.

    `is_own`: as /chat/completions of llama.cpp reads it, otherwise as /v1/chat/completions does.
    """
    state = state_of(request)
    body = await read_unqueued(request, ChatBody)
    check_option_tokens(state, body.options())
    size = len(await request.body())
    async with thread_turn(request, size):
        chat = await off_loop(size, partial(own_chat, state, body) if is_own else body.chat)
        check_tool_choice(chat)
        chat = await with_images(state, chat, "messages", request.receive)
        return body, chat, await chat_text(state, chat)


def _json(request: Request, answer: dict[str, Any], body: ChatBody, chat: Chat) -> Response:
    headers = ignored_header([*body.ignored, *unread_arguments(state_of(request), chat)])
    return Response(orjson.dumps(answer), media_type="application/json", headers=headers)
