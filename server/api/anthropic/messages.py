"""POST /v1/messages and POST /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.anthropic.diagnostics import message_diagnostics, name_of_message
from server.api.anthropic.schemas import CountTokensBody, MessagesBody
from server.api.anthropic.writer import MessagesWriter, new_message_id
from server.api.prefixes.inspection import Inspection
from server.api.receive import admit_and_read, encode, read_unqueued, thread_turn
from server.generation.chat_answer import answer_chat
from server.generation.chat_prompt import (
    adds_special_tokens,
    chat_text,
    unread_arguments,
    with_images,
)
from server.generation.off_loop import off_loop
from server.generation.prepare import PreparedRequest
from server.http.body import ignored_header
from server.http.openapi import ANTHROPIC_RESPONSES, body_schema
from server.state import state_of

router = APIRouter(responses=ANTHROPIC_RESPONSES)


@router.post("/v1/messages", openapi_extra=body_schema(MessagesBody, streams=True))
async def messages(request: Request) -> Response:
    """The next message of a chat, as in Anthropic's API."""
    state = state_of(request)
    body = await admit_and_read(request, MessagesBody, "generate")
    name = partial(name_of_message, body)
    inspection = Inspection(request, body.options(), body.compared_id, name)

    def writer(prepared: PreparedRequest) -> MessagesWriter:
        message_id = new_message_id()
        inspection.keep(message_id)
        if body.diagnostics is None:
            return MessagesWriter(prepared, message_id)
        return MessagesWriter(prepared, message_id, message_diagnostics(inspection))

    return await answer_chat(
        state,
        request,
        body.chat,
        body.options(),
        writer,
        param="messages",
        ignored=body.ignored,
        inspect=inspection,
    )


@router.post(
    "/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensBody, task="generate")
)
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of the prompt that these messages make."""
    state = state_of(request)
    body = await read_unqueued(request, CountTokensBody)
    state.check_task("generate")
    size = len(await request.body())
    async with thread_turn(request, size):
        chat = await off_loop(size, body.chat)
        chat = await with_images(state, chat, "messages", request.receive)
        text = await chat_text(state, chat)
        ids = await encode(state, text, add_special_tokens=adds_special_tokens(state, chat))
    headers = ignored_header([*body.ignored, *unread_arguments(state, chat)])
    count = {"input_tokens": len(ids)}
    return Response(orjson.dumps(count), media_type="application/json", headers=headers)
