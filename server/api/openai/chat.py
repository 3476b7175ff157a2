"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.chat_writer import ChatWriter
from server.api.openai.schemas.chat import ChatBody
from server.api.receive import admit_and_read
from server.generation.chat_answer import answer_chat
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody, streams=True))
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """The next message of a chat."""
    state = state_of(request)
    body = await admit_and_read(request, ChatBody, "generate")
    most = state.config.max_body_bytes
    if len(body.echoed) * (body.n or 1) > most:
        message = f"The last message, once for each of n choices, has over {most} characters."
        raise invalid("echo", message)
    names_ids = state.config.return_tokens_as_token_ids
    return await answer_chat(
        state,
        request,
        body.chat,
        body.options(),
        lambda prepared: ChatWriter(state.tokenizer, prepared, body, names_ids=names_ids),
        param="messages",
        ignored=body.ignored,
    )
