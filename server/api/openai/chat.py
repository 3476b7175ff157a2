"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.schemas.chat import ChatBody
from server.api.openai.writer import ChatWriter
from server.api.receive import admit_and_read
from server.generation.chat_prompt import chat_prompt, unread_arguments
from server.generation.off_loop import off_loop
from server.generation.prepare import prepare
from server.generation.response import respond
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """The next message of a chat."""
    state = state_of(request)
    body = await admit_and_read(request, ChatBody, "generate")
    size = len(await request.body())
    with state.client.reserve():
        chat = await off_loop(size, body.chat)
        prompt = await chat_prompt(state, chat)
    ignored = [*body.ignored, *unread_arguments(state, chat)]
    prepared = prepare(state, request, body.options(), [prompt], param="messages", ignored=ignored)
    return respond(state, prepared, ChatWriter(state.tokenizer, prepared, body))
