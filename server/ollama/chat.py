"""POST /api/chat, as in Ollama."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.generation.chat_answer import answer_chat
from server.generation.thinking import OFF
from server.http.errors import unsupported
from server.ollama.lines import Json, as_lines, now, whole_or_lines
from server.ollama.receive import admit_and_read, lines_schema
from server.ollama.schemas import ChatBody, GenerationBody
from server.ollama.writer import LinesWriter
from server.state import AppState, state_of

router = APIRouter()


@router.post("/api/chat", openapi_extra=lines_schema(ChatBody, task="generate"))
async def chat(request: Request) -> Response:
    """The next message of a chat, as in Ollama's API."""
    state = state_of(request)
    body = await admit_and_read(request, ChatBody, "generate")
    check_generation(state, body)
    if not body.messages:
        return loaded(body, {"message": {"role": "assistant", "content": ""}})
    options = body.generation_options()
    response = await answer_chat(
        state,
        request,
        body.chat,
        options,
        partial(LinesWriter, state.tokenizer),
        param="messages",
        ignored=body.ignored,
    )
    return as_lines(response, options)


def check_generation(state: AppState, body: GenerationBody) -> None:
    """Raise a 400 ApiError for options and thoughts that the model does not have."""
    body.given_options.check(state)
    shows_thoughts = state.answers is not None and state.answers.reasoning_name is not None
    if body.think and body.think not in OFF and not shows_thoughts:
        raise unsupported("think", f'think: "{body.model}" does not support thinking.')


def loaded(body: GenerationBody, content: Json) -> Response:
    """Return the answer to a body without a prompt, which asks Ollama to load the model."""
    if body.unloads:
        message = (
            "keep_alive: 0 asks to unload the model, which this server keeps as long as it runs. "
            "Stop the server, or serve several models: `penstock serve A B` unloads them."
        )
        raise unsupported("keep_alive", message)
    fields: Json = {"model": body.model, "created_at": now(), **content}
    fields |= {"done": True, "done_reason": "load"}
    return whole_or_lines([fields], is_streamed=body.is_streamed)
