"""POST /invocations: one address for every task, as SageMaker calls a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai import chat, completions, embeddings, rerank, score
from server.api.vllm import pooling
from server.http.body import Body, read_body
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()
Route = Callable[[Request], Awaitable[Response]]
# The first route whose fields a body has answers it.
ROUTES: tuple[tuple[tuple[str, ...], Route], ...] = (
    (("messages",), chat.chat_completions),
    (("query", "documents"), rerank.rerank),
    (("query", "texts"), rerank.rerank),
    (("input", "task"), pooling.pooling),
    (("input",), embeddings.embeddings),
    (("prompt",), completions.completions),
    (("text_1",), score.score),
    (("queries",), score.score),
    (("data_1",), score.score),
)


class InvocationBody(Body):
    """The fields that show which route a body belongs to. Its route validates all of it."""

    messages: Any = None
    """A body of /v1/chat/completions."""
    prompt: Any = None
    """A body of /v1/completions, or with `input` of /v1/embeddings."""
    query: Any = None
    """A body of /v1/rerank."""
    documents: Any = None
    """A body of /v1/rerank or /v1/score."""
    texts: Any = None
    """A body of /v1/rerank."""
    input: Any = None
    """A body of /v1/embeddings, or with `task` of /pooling."""
    task: Any = None
    """A body of /pooling."""
    text_1: Any = None
    """A body of /v1/score."""
    queries: Any = None
    """A body of /v1/score."""
    data_1: Any = None
    """A body of /v1/score."""


@router.post("/invocations", openapi_extra=body_schema(InvocationBody))
async def invocations(request: Request) -> Response:
    """Answer the body as the route that it belongs to."""
    body = await read_body(request, InvocationBody, state_of(request).body_turn)
    for names, route in ROUTES:
        if all(getattr(body, name) is not None for name in names):
            return await route(request)
    message = "The body has the fields of none of these: messages, prompt, query, input, queries."
    raise invalid(None, message)
