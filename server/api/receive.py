"""Receive a request: admission control if the engine has work to do, then the body.

Requests that only need the tokenizer pass no admission control, and take turns at the threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

from starlette.requests import Request

from server.generation.off_loop import INLINE_CHARS, off_loop
from server.http.body import BodyType, read_body
from server.http.openapi import Task
from server.state import AppState, state_of


async def admit_and_read(request: Request, kind: type[BodyType], task: Task) -> BodyType:
    """Return the validated body of a request for `task`.

    A full queue refuses the request before its body is read. Raises ApiError, EngineError or
    pydantic.ValidationError, which `to_api_error` converts.
    """
    state = state_of(request)
    state.client.admit(request.state.tenant)
    state.check_task(task)
    body = await read_body(request, kind, state.body_turn)
    state.model_name(body.model)  # raises if the request names another model
    return body


async def read_unqueued(request: Request, kind: type[BodyType]) -> BodyType:
    """Return the validated body of a request for the tokenizer. Raises as `admit_and_read` does."""
    state = state_of(request)
    state.loaded()
    body = await read_body(request, kind, state.body_turn)
    state.model_name(body.model)
    return body


def spare_threads() -> asyncio.Semaphore:
    """Return the turns of an application. Other threads are left for admitted prompts."""
    return asyncio.Semaphore(2)


def thread_turn(request: Request, size: int) -> AbstractAsyncContextManager[None]:
    """Return a context that limits how many of these requests use a thread at once.

    No queue bounds them. `off_loop` uses a thread if `size` is at least INLINE_CHARS.
    """
    if size < INLINE_CHARS:
        return contextlib.nullcontext()
    turns: asyncio.Semaphore = request.app.state.spare_threads
    return turns


async def encode(state: AppState, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text of any length."""
    return await off_loop(
        len(text), lambda: state.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )
