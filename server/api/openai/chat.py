"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.chat_writer import ChatWriter
from server.api.openai.schemas.chat import ChatBody
from server.api.receive import admit_and_read
from server.generation.chat_answer import answer_chat
from server.generation.chat_prompt import Chat
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """The next message of a chat."""
    body = await admit_and_read(request, ChatBody, "generate")
    return await complete_chat(request, body, body.chat, ChatWriter)


async def complete_chat(
    request: Request,
    body: ChatBody,
    read_chat: Callable[[], Chat],
    writer: type[ChatWriter],
) -> Response:
    """Return the response to a body; `read_chat` takes the conversation from it."""
    state = state_of(request)
    most = state.config.max_body_bytes
    if len(body.echoed) * (body.n or 1) > most:
        message = f"The last message, once for each of n choices, has over {most} characters."
        raise invalid("echo", message)
    names_ids = state.config.return_tokens_as_token_ids
    return await answer_chat(
        state,
        request,
        read_chat,
        body.options(),
        lambda prepared: writer(state.tokenizer, prepared, body, names_ids=names_ids),
        param="messages",
        ignored=body.ignored,
    )
