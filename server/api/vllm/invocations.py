"""POST /invocations: one address for every task, as SageMaker calls a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai import chat, classify, completions, embeddings, rerank, score
from server.api.vllm import pooling
from server.http.body import Body, read_body
from server.http.errors import invalid
from server.http.openapi import Task, body_schema
from server.state import state_of

router = APIRouter()


Route = Callable[[Request], Awaitable[Response]]
# The first entry whose fields a body has decides: the first of its tasks that the model does names
# the route. Without one, the first route refuses the body.
ROUTES: tuple[tuple[tuple[str, ...], Mapping[Task, Route]], ...] = (
    (("messages",), {"generate": chat.chat_completions}),
    (("query", "documents"), {"score": rerank.rerank}),
    (("query", "texts"), {"score": rerank.rerank}),
    (("input", "task"), {"embed": pooling.pooling}),
    (("input",), {"embed": embeddings.embeddings, "classify": classify.classify}),
    (("prompt",), {"generate": completions.completions}),
    (("text_1",), {"score": score.score, "classify": classify.classify}),
    (("queries",), {"score": score.score}),
    (("data_1",), {"score": score.score}),
)
NO_ROUTE = (
    "The body has the fields of none of these: messages; prompt; input; query with documents or "
    "texts; text_1, queries or data_1."
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
    """A body of /v1/embeddings, or of a classifier's /v1/classify; with `task` of /pooling."""
    task: Any = None
    """A body of /pooling."""
    text_1: Any = None
    """A body of /v1/score, or of /v1/classify if there are several labels."""
    queries: Any = None
    """A body of /v1/score."""
    data_1: Any = None
    """A body of /v1/score."""


@router.post("/invocations", openapi_extra=body_schema(InvocationBody))
async def invocations(request: Request) -> Response:
    """Answer the body as the route that it belongs to."""
    state = state_of(request)
    body = await read_body(request, InvocationBody, state.body_turn)
    for names, routes in ROUTES:
        if all(getattr(body, name) is not None for name in names):
            served = [route for task, route in routes.items() if task in state.tasks]
            route = (served or [*routes.values()])[0]
            return await route(request)
    raise invalid(None, NO_ROUTE)
