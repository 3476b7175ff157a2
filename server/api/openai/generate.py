"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.dialect import CHAT, COMPLETION, Dialect
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.writer import Answer
from server.api.receive import admit_and_read
from server.generation.prepare import (
    PreparedRequest,
    chat_prompt,
    make_echoes,
    prepare,
    text_prompts,
    unread_arguments,
)
from server.generation.sse import TokenStream
from server.http.disconnect import cancel_on_disconnect
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """The next message of a chat."""
    state = state_of(request)
    body = await admit_and_read(request, ChatBody, "generate")
    with state.client.reserve():
        prompts = [await chat_prompt(state, body, len(await request.body()))]
    ignored = unread_arguments(state, body)
    plan = prepare(state, request, body, prompts, param="messages", ignored=ignored)
    return await _respond(request, state, plan, CHAT)


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody, streams=True))
async def completions(request: Request) -> Response:
    """Continuations of one or more prompts; choice `prompt * n + k` is the k-th of a prompt."""
    state = state_of(request)
    body = await admit_and_read(request, CompletionBody, "generate")
    with state.client.reserve():
        prompts = await text_prompts(state, body.prompts)
        echoes = await make_echoes(state, body) if body.echo else None
    plan = prepare(state, request, body, prompts, param="prompt", echoes=echoes)
    return await _respond(request, state, plan, COMPLETION)


async def _respond(
    request: Request, state: AppState, plan: PreparedRequest, dialect: Dialect
) -> Response:
    """Submits the plan; a stream's headers wait for its first token, at most a ping's time, so
    that an early failure still has a status."""
    answer = Answer(state, plan, dialect)
    try:
        if plan.body.stream:
            await cancel_on_disconnect(
                request.receive, answer.generation.begin(state.config.ping_interval)
            )
            return TokenStream(answer)
        response = await answer.whole(request)
    except BaseException as error:
        answer.generation.close(error)
        raise
    answer.generation.close()
    return response
