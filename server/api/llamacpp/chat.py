"""POST /chat/completions, llama.cpp's path of chats: OpenAI's, with llama.cpp's additions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.llamacpp.chat_writer import LlamaChatWriter, VerboseChatWriter
from server.api.llamacpp.errors import own_errors
from server.api.llamacpp.progress import check_progress
from server.api.llamacpp.schemas import LlamaChatBody
from server.api.llamacpp.template_values import own_chat
from server.api.openai.chat import complete_chat
from server.api.receive import admit_and_read
from server.state import state_of

router = APIRouter()


@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """The next message of a chat, with the template variables and errors of llama.cpp."""
    state = state_of(request)
    body = await admit_and_read(request, LlamaChatBody, "generate")
    check_progress(state, body.return_progress)
    shows_prompt = body.verbose
    if shows_prompt is None:  # llama.cpp's flag --verbose has the same effect
        shows_prompt = state.config.log_level == "debug"
    with own_errors(state):
        return await complete_chat(
            request,
            body,
            lambda: own_chat(state, body),
            VerboseChatWriter if shows_prompt else LlamaChatWriter,
        )
