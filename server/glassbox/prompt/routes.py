"""POST /ui/api/prompt: the tokens of a prompt, and which of them are in the prefix cache."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.protocol.generate import Image
from server.api.openai.tokenize import cached_tokens, prompt_text
from server.api.prefixes.difference import RenderedPrompt
from server.api.prefixes.record import prompt_record
from server.api.receive import read_unqueued, thread_turn
from server.generation.cache_salt import cache_salt_of
from server.generation.chat_prompt import Chat, unread_arguments
from server.generation.off_loop import off_loop
from server.generation.prompt_lint import RenderedChat, lint
from server.generation.prompts import encode_prompt
from server.glassbox.access import refuse_unknown, state_for_ui
from server.glassbox.prompt.comparison import PromptBody, comparison
from server.glassbox.requests.step_log import Recorder
from server.glassbox.requests.step_model import fit
from server.glassbox.state import glassbox_of
from server.http.body import ignored_header
from server.http.compression import json_response
from server.http.openapi import body_schema
from server.state import AppState

router = APIRouter()


@router.post("/ui/api/prompt", openapi_extra=body_schema(PromptBody))
async def prompt(request: Request) -> Response:
    """Return the text and tokens of a prompt, and how many of them a request would find cached.

    `pieces` are slices of `text` that make it up, one for each token. A token that has only a part
    of a character has the piece "" and its `bytes`. `images` are those of the chat, in order.
    `prefill` is what a prompt token costs by the recorded steps, or null. `comparison` is that with
    another prompt, or null. Unknown fields inside a message are reported, as a chat does.
    """
    state = state_for_ui(request)
    body = await read_unqueued(request, PromptBody)
    refuse_unknown([name for name in body.ignored if "." not in name])
    size = len(await request.body())
    async with thread_turn(request, size):
        chat, text, add = await prompt_text(request, body, size)
    async with thread_turn(request, len(text)):
        answer = await off_loop(len(text), lambda: _tokens(state, chat, text, add))
    salt = cache_salt_of(request)
    images = () if chat.images is None else chat.images.placed(answer["ids"], salt)
    answer["images"] = [_image(each) for each in images]
    answer["cached_tokens"] = await cached_tokens(state, answer["ids"], salt, images=images)
    record = prompt_record(chat, answer["ids"], answer["block_size"], salt, adapter=0)
    rendered = RenderedPrompt(chat, text, add, record)
    answer["comparison"] = await comparison(request, body, rendered, answer["ids"])
    answer["prefill"] = await asyncio.to_thread(_prefill_cost, glassbox_of(request).recorder)
    headers = ignored_header([*body.ignored, *unread_arguments(state, chat)])
    return await asyncio.to_thread(json_response, request, answer, headers)


def _tokens(state: AppState, chat: Chat, text: str, add: bool) -> dict[str, Any]:
    """Return the answer but for what the engine knows. Raises a 400 ApiError far over the limit."""
    tokenizer = state.tokenizer
    param = "messages" if chat.messages else "prompt"
    ids = encode_prompt(state, text, param, add_special_tokens=add)
    offsets = tokenizer.offsets(text, add_special_tokens=add)
    if not ids and not chat.messages:  # as /v1/completions does
        ids = list(tokenizer.document_start)
        offsets = [0] * len(ids)
    ready = state.loaded()
    return {
        "text": text,
        "ids": ids,
        "offsets": offsets,
        "pieces": [text[begin:end] for begin, end in pairwise([*offsets, len(text)])],
        "entries": [tokenizer.vocabulary_entry(token) for token in ids],
        "bytes": [_partial_bytes(tokenizer.token_bytes(token)) for token in ids],
        "special": [token in tokenizer.special_ids for token in ids],
        "block_size": ready.block_size,
        "max_model_len": state.max_length(),
        "max_num_batched_tokens": ready.max_num_batched_tokens,
        "lint": [dataclasses.asdict(found) for found in lint(state, RenderedChat(chat, text, ids))],
    }


def _image(image: Image) -> dict[str, Any]:
    """Return where an image is in the prompt, and how it was cut.

    `runs` are its tokens as [first, count]. `grid` has rows and columns: of the tiles without an
    overview, or if there is one tile, of its tokens.
    """
    height, width = image.size
    return {
        "runs": image.runs,
        "tokens": image.num_tokens,
        "tiles": image.shape[0],
        "grid": image.grid,
        "width": width,
        "height": height,
    }


def _partial_bytes(content: bytes) -> str | None:
    """Return the bytes of a token in hex if they are not whole characters."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.hex()
    return None


def _prefill_cost(recorder: Recorder) -> dict[str, Any] | None:
    """Return the cost of prompt tokens by the fit, or None without a prompt in recorded steps."""
    model = fit(recorder.steps_for_fit())
    if model.r2 is None or model.prefill + model.context == 0:
        return None
    return {
        "us_per_token": model.prefill * 1e6,
        "ns_per_key": model.context * 1e9,
        "base_ms": model.constant * 1e3,
        "r2": model.r2,
        "steps": model.num_steps,
    }
