"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.dialect import CHAT
from server.plan import chat_prompt, make_plan, unread_arguments
from server.routes.generate import respond
from server.schemas import ChatBody, read_body
from server.schemas.body import documented
from server.service import service_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    """The next message of a chat."""
    service = service_of(request)
    service.client.admit(1)
    body = await read_body(request, ChatBody)
    service.model_name(body.model)
    prompts = [await chat_prompt(service, body)]
    ignored = unread_arguments(service, body)
    plan = make_plan(service, request, body, prompts, param="messages", ignored=ignored)
    return await respond(request, service, plan, CHAT)
