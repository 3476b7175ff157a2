"""POST /api/generate, as in Ollama: one prompt, by the chat template or as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.generation.chat_answer import answer_chat
from server.generation.infill import infill_prompts, with_infill_ends
from server.generation.prepare import prepare
from server.generation.prompts import text_prompts
from server.generation.response import respond
from server.http.errors import unsupported
from server.ollama.chat import check_generation, loaded
from server.ollama.lines import as_lines
from server.ollama.receive import admit_and_read, lines_schema
from server.ollama.schemas import GenerateBody
from server.ollama.writer import GenerateWriter
from server.state import AppState, state_of

router = APIRouter()
PLAIN = re.compile(r"\{\{-?\s*\.Prompt\s*-?\}\}")  # Ollama's template that adds nothing
OF_CHATS = ("system", "images", "think")  # fields that a prompt without a template cannot have


@router.post("/api/generate", openapi_extra=lines_schema(GenerateBody, task="generate"))
async def generate(request: Request) -> Response:
    """Answer a prompt, or continue a raw one, as in Ollama's API."""
    state = state_of(request)
    body = await admit_and_read(request, GenerateBody, "generate")
    check_generation(state, body)
    if body.prompt is None and body.suffix is None and not body.images:
        return loaded(body, {"response": ""})
    why_raw = _why_raw(state, body)
    if why_raw:
        for name in OF_CHATS:
            if getattr(body, name):
                raise unsupported(name, f"{name} is not supported {why_raw}.")
        return await _continued(state, request, body)
    options = body.generation_options()
    response = await answer_chat(
        state,
        request,
        body.chat,
        options,
        partial(GenerateWriter, state.tokenizer),
        param="prompt",
        ignored=body.ignored,
    )
    return as_lines(response, options)


def _why_raw(state: AppState, body: GenerateBody) -> str:
    """Return why the prompt is read without a chat template; "" if it is read with one.

    Raises a 400 ApiError for a template that is not plain.
    """
    is_plain = body.template is not None and PLAIN.fullmatch(body.template.strip()) is not None
    if body.template is not None and not is_plain:
        message = (
            "template is not supported by this server, except {{ .Prompt }}. Start it with "
            "--chat-template, or send the whole text with raw."
        )
        raise unsupported("template", message)
    if body.raw:
        return "with raw"
    if body.suffix is not None:
        return "with suffix"
    if is_plain:
        return "with the template {{ .Prompt }}"
    if state.template is None and state.start_token is None:
        return "here: the model has no chat template"
    return ""


async def _continued(state: AppState, request: Request, body: GenerateBody) -> Response:
    """Return the response that continues the prompt, or fills the gap before the suffix."""
    options = replace(body.generation_options(), operation="text_completion")
    prompts: tuple[str, ...] = (body.prompt or "",)
    if body.suffix is not None:
        prompts = infill_prompts(state, prompts, body.suffix)
        options = with_infill_ends(state, options)
    with state.client.reserve(request.state.tenant):
        ids = await text_prompts(state, prompts)
    prepared = prepare(state, request, options, ids, param="prompt", ignored=body.ignored)
    writer = GenerateWriter(state.tokenizer, prepared)
    return as_lines(respond(state, prepared, writer), options)
