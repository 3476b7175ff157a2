"""Prompts without the model: /tokenize, /detokenize, and the rendering of a chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol.generate import Image
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.api.receive import encode, read_unqueued, thread_turn
from server.generation.cache_salt import cache_salt_of
from server.generation.chat_prompt import (
    Chat,
    adds_special_tokens,
    chat_text,
    unread_arguments,
    with_images,
)
from server.generation.limits import check_token_ids
from server.generation.off_loop import off_loop
from server.generation.parsing import check_tool_choice
from server.generation.prompt_lint import RenderedChat, lint
from server.generation.sampling import check_option_tokens
from server.http.body import ignored_header
from server.http.openapi import body_schema
from server.state import AppState, state_of
from server.text.detokenizer import Detokenizer, token_texts
from server.text.tokenizer import Tokenizer, without_breaks

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a chat rendered by the chat template."""
    state = state_of(request)
    body = await read_unqueued(request, TokenizeBody)
    size = len(await request.body())
    async with thread_turn(request, size):
        chat, text, add = await prompt_text(request, body, size)
        ids = await encode(state, text, add_special_tokens=add)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.max_length(),
        "tokens": ids,
        "token_strs": None,
    }
    async with thread_turn(request, len(ids)):
        if body.return_token_strs:
            answer["token_strs"] = await _vocabulary_entries(state, ids)
        if body.with_pieces:
            answer["tokens"] = await off_loop(len(ids), lambda: _pieces(state.tokenizer, ids))
    return _json(answer, [*body.ignored, *unread_arguments(state, chat)])


async def prompt_text(request: Request, body: TokenizeBody, size: int) -> tuple[Chat, str, bool]:
    """Return the chat, its prompt text, and whether the tokenizer adds special tokens to it.

    `size` is that of the body in bytes. A prompt is a chat without messages.
    """
    state = state_of(request)
    chat = await off_loop(size, body.chat)
    check_tool_choice(chat)
    if body.text is not None:
        return chat, body.text, body.adds_special_tokens
    chat = await with_images(state, chat, "messages", request.receive)
    return chat, await chat_text(state, chat), adds_special_tokens(state, chat)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of a list of tokens."""
    state = state_of(request)
    body = await read_unqueued(request, DetokenizeBody)
    check_token_ids(state, body.tokens, "tokens")
    async with thread_turn(request, len(body.tokens)):
        skip = bool(body.skip_special_tokens)
        detokenizer = Detokenizer(state.tokenizer, skip_special_tokens=skip)
        texts = await off_loop(len(body.tokens), lambda: token_texts(detokenizer, body.tokens))
    text = "".join(texts)
    answer: dict[str, Any] = {"prompt": text, "content": text}  # vLLM's name, and llama.cpp's
    if body.return_texts:
        answer["texts"] = texts
    return _json(answer, body.ignored)


@router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatBody))
async def render(request: Request) -> Response:
    """Return the prompt that a chat becomes, its tokens, and warnings about it."""
    state = state_of(request)
    body = await read_unqueued(request, ChatBody)
    check_option_tokens(state, body.options())
    size = len(await request.body())
    async with thread_turn(request, size):
        chat = await off_loop(size, body.chat)
        check_tool_choice(chat)
        chat = await with_images(state, chat, "messages", request.receive)
        text = await chat_text(state, chat)
    async with thread_turn(request, len(text)):
        answer = await off_loop(len(text), lambda: _rendered(state, chat, text))
    salt = cache_salt_of(request, body.options().cache_salt)
    adapter = state.adapters.find(body.model)
    ids = answer["token_ids"]
    answer["cached_tokens"] = await cached_tokens(
        state,
        ids,
        salt,
        0 if adapter is None else adapter.id,
        () if chat.images is None else chat.images.placed(ids, salt),
    )
    return _json(answer, [*body.ignored, *unread_arguments(state, chat)])


async def cached_tokens(
    state: AppState,
    ids: list[int],
    salt: str,
    adapter: int = 0,
    images: Sequence[Image] = (),
) -> int:
    """Return how many tokens of a prompt a request with this salt would find in the prefix cache.

    It is 0 for an encoder, which has none, and for a prompt that no request may have.
    """
    if state.task != "generate" or not 0 < len(ids) <= state.max_length():
        return 0
    start = state.start_token
    if start is None:
        return await state.client.num_cached(ids, salt, adapter=adapter, images=images)
    return await state.client.num_cached([start], salt, encoder_prompt=ids)


def _rendered(state: AppState, chat: Chat, text: str) -> dict[str, Any]:
    """Return the answer of /v1/chat/completions/render."""
    add = adds_special_tokens(state, chat)
    ids = state.tokenizer.encode(text, add_special_tokens=add)
    warnings = lint(state, RenderedChat(chat, text, ids))
    return {
        "object": "chat.completion.render",
        "model": state.names[0],
        "prompt": without_breaks(text),
        "count": len(ids),
        "max_model_len": state.max_length(),
        "token_ids": ids,
        "offsets": state.tokenizer.offsets(text, add_special_tokens=add),
        "token_strs": [state.tokenizer.vocabulary_entry(token) for token in ids],
        "lint": [dataclasses.asdict(warning) for warning in warnings],
    }


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return the tokenizer's class, vocabulary size and special tokens, and the chat template."""
    state = state_of(request)
    tokenizer = state.tokenizer
    longest = state.max_length()
    special_ids = sorted(tokenizer.special_ids)
    return {
        "tokenizer_class": tokenizer.class_name,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": longest,
        **tokenizer.special_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "special_tokens": {token: tokenizer.vocabulary_entry(token) for token in special_ids},
        **_templates(state),
    }


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return each token with its text, or with its bytes if they are no whole characters."""
    found = []
    for token in ids:
        data = tokenizer.token_bytes(token)
        piece: str | list[int]
        try:
            piece = data.decode()
        except UnicodeDecodeError:
            piece = list(data)
        found.append({"id": token, "piece": piece})
    return found


def _templates(state: AppState) -> dict[str, str | None]:
    """Return the chat template, and the one of chats with tools if there is another."""
    template = state.template
    if template is None:
        return {"chat_template": None}
    more = {"tool_use_template": template.for_tools.source} if template.has_tool_use else {}
    return {"chat_template": template.source, **more}


async def _vocabulary_entries(state: AppState, ids: Sequence[int]) -> list[str | None]:
    entry = state.tokenizer.vocabulary_entry
    return await off_loop(len(ids), lambda: [entry(token) for token in ids])


def _json(answer: dict[str, Any], ignored: Sequence[str]) -> Response:
    headers = ignored_header(ignored)
    return Response(orjson.dumps(answer), media_type="application/json", headers=headers)
