"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.dialect import COMPLETION
from server.plan import make_plan, text_prompts
from server.routes.generate import respond
from server.schemas import CompletionBody, read_body
from server.schemas.body import documented
from server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions", openapi_extra=documented(CompletionBody))
async def completions(request: Request) -> Response:
    """Continuations of one or more prompts; choice `prompt * n + k` is the k-th of a prompt."""
    service = service_of(request)
    service.client.admit(1)
    body = await read_body(request, CompletionBody)
    service.model_name(body.model)
    prompts = await text_prompts(service, body.prompts)
    plan = make_plan(service, request, body, prompts, param="prompt", echoes=_echoes(service, body))
    return await respond(request, service, plan, COMPLETION)


def _echoes(service: Service, body: CompletionBody) -> list[str] | None:
    if not body.echo:
        return None
    decode = service.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in body.prompts]
