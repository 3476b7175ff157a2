"""Receive a request of Ollama's API, and describe it in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from server.http.body import Body, BodyType, read_body
from server.http.openapi import LINES, Task, body_schema
from server.state import AppState, state_of

LATEST = ":latest"  # the tag that Ollama adds to a name without one


async def admit_and_read(request: Request, kind: type[BodyType], task: Task) -> BodyType:
    """Return the validated body of a request for `task`, with a name of the model that is served.

    A full queue refuses the request before its body is read. Raises as `read_body` does.
    """
    state = state_of(request)
    state.client.admit(request.state.tenant)
    state.check_task(task)
    return named(state, await read_body(request, kind, state.body_turn))


def named(state: AppState, body: BodyType) -> BodyType:
    """Return the body with a name that is served. Raises a 404 ApiError if there is none."""
    return body.model_copy(update={"model": served_name(state, body.model)})


def served_name(state: AppState, asked: str | None) -> str:
    """Return the name of a model for the response; `NAME:latest` is NAME.

    Raises a 404 ApiError for an unknown model.
    """
    if asked and asked.endswith(LATEST) and asked not in state.names:
        asked = asked.removesuffix(LATEST)
    return state.model_name(asked)


def lines_schema(kind: type[Body], *, task: Task | None) -> dict[str, Any]:
    """Return the `openapi_extra` of an operation that may stream lines of JSON."""
    extra = body_schema(kind, task=task)
    return extra | {"responses": {"200": {"content": {LINES: {}}}}}
