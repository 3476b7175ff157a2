"""/v1/responses: make a response, and read or delete a stored one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.prefixes.inspection import Inspection
from server.api.receive import admit_and_read, encode, read_unqueued, thread_turn
from server.api.responses.diagnostics import cache_diagnostics, name_of_item
from server.api.responses.ids import new_response_id
from server.api.responses.page import PAGE, read_page
from server.api.responses.schemas import ResponsesBody
from server.api.responses.store import ResponseStore, StoredResponse
from server.api.responses.turn import StoredItems, Turn, input_items, read_turn
from server.api.responses.writer import ResponsesWriter
from server.generation.chat_answer import answer_chat
from server.generation.chat_prompt import (
    adds_special_tokens,
    chat_text,
    unread_arguments,
    with_images,
)
from server.generation.off_loop import off_loop
from server.generation.prepare import PreparedRequest
from server.http.body import JSON, ignored_header
from server.http.errors import ApiError, invalid, unsupported
from server.http.openapi import body_schema
from server.state import AppState, state_of
from server.text import exact_json
from server.text.chat_template import TemplateError

router = APIRouter()


def store_of(request: Request) -> ResponseStore:
    store = request.app.state.response_store
    assert isinstance(store, ResponseStore)
    return store


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody, streams=True))
async def create_response(request: Request) -> Response:
    """A response to an input. With `store`, later requests can continue it by its id."""
    body = await admit_and_read(request, ResponsesBody, "generate")
    return await respond_to(request, body, ResponsesWriter)


async def respond_to(
    request: Request, body: ResponsesBody, kind: type[ResponsesWriter]
) -> Response:
    """Return the response to a body, written by a writer of the given class."""
    state = state_of(request)
    response_id = new_response_id()
    turn = await _read_turn(state, request, body, response_id)
    keep = _keeper(request, body, response_id, turn)
    name = partial(name_of_item, turn, body)
    inspection = Inspection(request, body.options(), body.compared_id, name)

    def writer(prepared: PreparedRequest) -> ResponsesWriter:
        inspection.keep(response_id)
        diagnostics = cache_diagnostics(inspection)
        called = turn.tools.called
        return kind(state.tokenizer, prepared, body, response_id, keep, called, diagnostics)

    with _errors_name_input():
        return await answer_chat(
            state,
            request,
            lambda: body.chat(turn.messages, turn.tools),
            body.options(),
            writer,
            param="input",
            ignored=body.ignored,
            inspect=inspection,
        )


@router.post(
    "/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesBody, task="generate")
)
async def input_tokens(request: Request) -> Response:
    """Return the number of tokens of the prompt that this request would have."""
    state = state_of(request)
    body = await read_unqueued(request, ResponsesBody)
    state.check_task("generate")
    turn = await _read_turn(state, request, body, new_response_id())
    size = len(await request.body())
    with _errors_name_input():
        async with thread_turn(request, size):
            chat = body.chat(turn.messages, turn.tools)
            chat = await with_images(state, chat, "input", request.receive)
            text = await chat_text(state, chat)
            ids = await encode(state, text, add_special_tokens=adds_special_tokens(state, chat))
    headers = ignored_header([*body.ignored, *unread_arguments(state, chat)])
    count = {"object": "response.input_tokens", "input_tokens": len(ids)}
    return Response(orjson.dumps(count), media_type=JSON, headers=headers)


@router.get("/v1/responses", include_in_schema=False)
async def connect() -> Response:
    """Refuse a WebSocket with a 405, which clients answer by sending the request over HTTP."""
    message = "Responses are made by POST. This server opens no WebSocket and lists no responses."
    raise ApiError(405, "method_not_allowed", message, headers={"allow": "POST"})


@router.get("/v1/responses/{response_id}")
async def response(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        message = "Only a response of a background request can be streamed again."
        raise unsupported("stream", message)
    return _json(_stored(request, response_id).body)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response. It cannot be continued then, nor can those that continue it."""
    if not store_of(request).remove(request.state.tenant, response_id):
        raise _not_found(response_id)
    return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))


@router.post("/v1/responses/compact")
async def compact() -> Response:
    """Refuse with a 404: conversations cannot be compacted."""
    # Without this route, the path matches that of a stored response, and the answer is a 405.
    raise ApiError(404, "not_found", "Conversations cannot be compacted here: send fewer items.")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse: only background responses can be cancelled, which this server does not make."""
    _stored(request, response_id)
    message = "Only a background response can be cancelled; this one is complete."
    raise invalid("response_id", message)


@router.get("/v1/responses/{response_id}/input_items", openapi_extra={"parameters": PAGE})
async def response_input_items(request: Request, response_id: str) -> Response:
    """List the items that a stored response answers, with those of the responses before it."""
    page = read_page(request.query_params)
    try:
        conversation = store_of(request).conversation(request.state.tenant, response_id)
    except KeyError as error:
        raise _not_found(error.args[0]) from None
    size = sum(stored.size for stored in conversation)

    def listed() -> bytes:
        return exact_json.dumps(page.of(input_items(conversation)))

    return _json(await off_loop(size, listed))


async def _read_turn(
    state: AppState, request: Request, body: ResponsesBody, response_id: str
) -> Turn:
    """Return the input of a response. Raises a 404 ApiError for what is not stored."""
    store = store_of(request)
    tenant = request.state.tenant
    try:
        conversation = store.conversation(tenant, body.previous_response_id)
    except KeyError as error:
        message = _missing(error.args[0])
        raise ApiError(
            404, "previous_response_not_found", message, param="previous_response_id"
        ) from None
    stored = StoredItems(store, tenant)
    size = len(await request.body()) + sum(response.size for response in conversation)
    with state.client.reserve(request.state.tenant):
        return await off_loop(size, lambda: read_turn(body, response_id, conversation, stored))


def _keeper(
    request: Request, body: ResponsesBody, response_id: str, turn: Turn
) -> Callable[[bytes], None] | None:
    """Return a function that stores the response, or None if it is not to be stored."""
    store = store_of(request)
    tenant = request.state.tenant
    if body.store is False or not store.is_enabled:
        return None

    own = turn.items

    def keep(response: bytes) -> None:
        items = exact_json.dumps(own)
        previous = body.previous_response_id
        store.add(tenant, StoredResponse(response_id, previous, response, items))

    return keep


@contextlib.contextmanager
def _errors_name_input() -> Iterator[None]:
    """Let errors name the field `input` instead of the chat API's `messages`."""
    try:
        yield
    except TemplateError as error:
        message = f"The chat template cannot render the input: {error}"
        raise invalid("input", message) from None
    except ApiError as error:
        if error.param != "messages":
            raise
        raise dataclasses.replace(error, param="input") from None


def _stored(request: Request, response_id: str) -> StoredResponse:
    """Return a stored response of the tenant, or raise a 404 ApiError."""
    found = store_of(request).get(request.state.tenant, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, "response_not_found", _missing(response_id), param="response_id")


def _missing(response_id: str) -> str:
    return (
        f"Response with id {response_id[:128]!r} not found: it was never stored, or was deleted, "
        "or made room for later ones."
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type=JSON)
