"""Receive a request for the model: admission control, then the body."""

from __future__ import annotations

from starlette.requests import Request

from server.http.body import BodyType, read_body
from server.http.openapi import Task
from server.state import state_of


async def admit_and_read(request: Request, kind: type[BodyType], task: Task) -> BodyType:
    """Return the validated body of a request for `task`.

    A full queue refuses the request before its body is read. Raises ApiError, EngineError or
    pydantic.ValidationError, which `to_api_error` converts.
    """
    state = state_of(request)
    state.client.admit()
    state.check_task(task)
    body = await read_body(request, kind, state.large_bodies)
    state.model_name(body.model)  # raises if the request names another model
    return body
