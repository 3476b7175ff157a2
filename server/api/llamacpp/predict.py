"""POST /predict: several bodies in one request, as Vertex AI calls a server (its predict route)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.llamacpp import chat, completion, embedding, properties
from server.api.openai import chat as openai_chat
from server.api.openai import completions, embeddings
from server.http.body import Body, read_body
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import invalid
from server.http.openapi import body_schema
from server.state import state_of

router = APIRouter()
Json = dict[str, Any]
Route = Callable[[Request], Awaitable[Response]]
FORMAT = "@requestFormat"
MAX_INSTANCES = 128
# llama.cpp's names of routes: their paths in camel case, without /v1. Paths are names, too.
PATHS: Mapping[str, tuple[str, Route]] = MappingProxyType(
    {
        "chatCompletions": ("/v1/chat/completions", openai_chat.chat_completions),
        "completions": ("/v1/completions", completions.completions),
        "embeddings": ("/v1/embeddings", embeddings.embeddings),
        "completion": ("/completion", completion.completion),
        "infill": ("/infill", completion.infill),
        "embedding": ("/embedding", embedding.embedding),
        "applyTemplate": ("/apply-template", properties.apply_template),
    }
)
ROUTES: Mapping[str, tuple[str, Route]] = MappingProxyType(
    {"/chat/completions": ("/chat/completions", chat.chat_completions)}
    | {path: (path, route) for path, route in PATHS.values()}
    | dict(PATHS)
)


class PredictBody(Body):
    """Vertex AI's body of a prediction."""

    instances: Annotated[
        list[dict[str, Any]], Field(min_length=1, max_length=MAX_INSTANCES, fail_fast=True)
    ]
    """Bodies of other routes, without streams. `@requestFormat` names the route of each."""
    parameters: dict[str, Any] | None = None
    """Must be empty: each instance has its own parameters."""


@router.post("/predict", openapi_extra=body_schema(PredictBody))
async def predict(request: Request) -> Response:
    """Answer each instance as the route that it names; an error is the prediction of its own."""
    body = await read_body(request, PredictBody, state_of(request).body_turn)
    if body.parameters:
        raise invalid("parameters", "parameters is not supported: put them into each instance.")
    for place, instance in enumerate(body.instances):
        _check(instance, f"instances.{place}")
    return _Predictions(request, body.instances)


def _check(instance: Json, param: str) -> None:
    name = instance.get(FORMAT)
    if not isinstance(name, str) or name not in ROUTES:
        message = f"{FORMAT} must be one of {', '.join(PATHS)}, or a path of one of them."
        raise invalid(param, message)
    if instance.get("stream"):
        raise invalid(f"{param}.stream", "stream is not supported: a prediction is one answer.")


class _Predictions(Response):
    """The response with the answers to all instances. They are computed at the same time."""

    media_type = "application/json"

    def __init__(self, request: Request, instances: list[Json]) -> None:
        self._request = request
        self._instances = instances
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limiter = scope["state"]["limiter"]
        with ExitStack() as counted:
            for _ in self._instances[1:] if limiter else ():  # Gate has counted the first one
                limiter.begin()
                counted.callback(limiter.end)
            found = await cancel_on_disconnect(receive, self._predict())
        self.body = b'{"predictions":[' + b",".join(found) + b"]}"
        self.init_headers()
        await super().__call__(scope, receive, send)

    async def _predict(self) -> list[bytes]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._prediction(each)) for each in self._instances]
        return [task.result() for task in tasks]

    async def _prediction(self, instance: Json) -> bytes:
        """Return the JSON of the answer to one instance, or of its error."""
        path, route = ROUTES[instance[FORMAT]]
        fields = {name: value for name, value in instance.items() if name != FORMAT}
        inner = _Inner(self._request, path, orjson.dumps(fields))
        try:
            response = await route(Request(inner.scope, inner.receive))
            await response(inner.scope, inner.receive, inner.send)
        except Exception as error:
            answer = state_of(self._request).api_error(error)
            if answer.status == 500:  # RequestBoundary logs its cause
                raise
            return answer.body(self._request.state.request_id, path)
        return bytes(inner.answer)


class _Inner:
    """The request of one instance, in this process."""

    def __init__(self, request: Request, path: str, body: bytes) -> None:
        self.scope: Scope = {**request.scope, "path": path, "raw_path": path.encode()}
        self.scope["state"] = dict(request.scope["state"])
        self.scope["headers"] = list(request.scope["headers"])
        MutableHeaders(scope=self.scope)["content-length"] = str(len(body))
        self.answer = bytearray()
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """Return the body, then wait: `cancel_on_disconnect` of the outer request ends it."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        self.answer += message.get("body", b"")
