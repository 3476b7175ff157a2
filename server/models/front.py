"""The ASGI application in front of several models: what it answers itself, and what it forwards.

Keys and limits are checked here, once, before a request may load a model. The servers of the models
read the same keys, to tell clients apart; they refuse nothing that passed here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from server.http.auth import BODY_METHODS, UPLOAD_PATH, Gate
from server.http.boundary import CrossOrigin, RequestBoundary
from server.http.errors import NO_RETRY, ApiError, invalid
from server.models import ollama, own
from server.models.catalog import Catalog, ModelSpec
from server.models.counts import PoolCounts
from server.models.forward import Forwarder
from server.models.pool import ModelPool
from server.models.routing import (
    BY_HAND,
    PREFIX,
    by_id,
    by_name,
    named,
    queried,
    read_body,
    split_prefix,
    unknown_model,
    with_file,
)

MODEL = "penstock.model"  # scope key: the ModelSpec that the path has named
SIBLINGS = "/ui/api/models"  # a path that the pages of each model read
POLLED = (re.compile(r"/ui/api/(?!explain|ablate|lens|prompt).*"),)

Answer = Callable[["Front", Request], Awaitable[Response]]
OWN: dict[tuple[str, str], Answer] = {
    ("GET", "/"): own.pages,
    ("GET", "/ui"): own.pages,
    ("GET", "/ui/"): own.pages,
    ("GET", "/health"): own.health,
    ("GET", "/ping"): own.health,
    ("POST", "/ping"): own.health,
    ("GET", "/ready"): own.ready,
    ("GET", "/load"): own.load,
    ("GET", "/metrics"): own.metrics,
    ("GET", "/version"): own.version,
    ("GET", "/v1/models"): own.models,
    ("GET", "/models"): own.models,
    ("GET", SIBLINGS): own.models,
    **ollama.ANSWERS,
}


@dataclass
class Front:
    """The parent: its settings, its models and their processes."""

    config: ServerConfig
    catalog: Catalog
    pool: ModelPool
    keys: ApiKeys
    counts: PoolCounts
    started: int  # Unix seconds
    state: Literal["ready", "draining"] = "ready"

    def app(self) -> ASGIApp:
        """Return the application: the path's model, the boundary, the gate, and the router."""
        app: ASGIApp = Gate(Router(self), config=self.config, keys=self.keys)
        # A model's server logs what it answers; only errors are logged here, too.
        config = replace(self.config, access_log_sample=0.0)
        app = RequestBoundary(app, config=config, client=self, metrics=self.counts, polled=POLLED)
        app = PathModel(app, self.catalog)
        if self.config.allowed_origins:
            origins = self.config.allowed_origins
            app = CrossOrigin(app, origins=origins, metrics=self.counts)
        return app


class PathModel:
    """Middleware that takes /model/NAME off a path, so that others see a model's own path."""

    def __init__(self, app: ASGIApp, catalog: Catalog) -> None:
        self._app = app
        self._catalog = catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (found := split_prefix(self._catalog, scope)) is not None:
            spec, scope = found
            scope[MODEL] = spec
        await self._app(scope, receive, send)


class Router:
    """Answers what is the parent's, and forwards the rest to the model that it names."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._forwarder = Forwarder(front.pool)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        method: str = scope["method"]
        if path in self._front.config.disabled_paths:
            text = f"{path} is disabled on this server: see --disabled-paths."
            raise ApiError(501, "path_disabled", text, headers=NO_RETRY)
        spec: ModelSpec | None = scope.get(MODEL)
        answer = OWN.get((method, path))
        if answer is not None and (spec is None or path == SIBLINGS):
            response = await answer(self._front, Request(scope, receive))
            await response(scope, receive, send)
            return
        if self._front.state == "draining":
            raise ApiError(503, "shutting_down", "The server is shutting down.")
        if path.startswith(PREFIX):
            raise unknown_model(path.removeprefix(PREFIX).strip("/"))
        spec = spec or queried(self._front.catalog, scope)
        if method == "POST" and path == UPLOAD_PATH:
            await self._forwarder.forward_upload(self._need(spec), scope, receive, send)
            return
        body = await read_body(scope, receive) if method in BODY_METHODS else b""
        spec = spec or await self._found(scope, body)
        if method == "POST" and ollama.asks_to_unload(path, body):
            response = await ollama.unload(self._front, spec, path)
            await response(scope, receive, send)
            return
        await self._forwarder.forward(spec, body, scope, receive, send)

    async def _found(self, scope: Scope, body: bytes) -> ModelSpec:
        """Return the model that a request without one in its path is for. Raises ApiError."""
        front, path = self._front, scope["path"]
        stored = await by_id(front.catalog, front.pool, front.config.batch_dir, scope)
        if stored is not None:
            return stored
        if path.startswith("/v1/models/") and scope["method"] == "GET":
            return by_name(front.catalog, path.removeprefix("/v1/models/"))
        if scope["method"] not in BODY_METHODS or not body:
            return self._need(None)
        fields = named(scope, body)
        name = fields.model or fields.name
        if name:
            return by_name(front.catalog, name)
        if fields.input_file_id:
            made = with_file(front.catalog, front.config.batch_dir, "files", fields.input_file_id)
            if made is not None:
                return made
        return self._need(None)

    def _need(self, spec: ModelSpec | None) -> ModelSpec:
        """Return the model, or the only one. Raises a 400 ApiError if there are several."""
        specs = self._front.catalog.specs
        if spec is None and len(specs) == 1:
            [spec] = specs.values()
        if spec is None:
            text = f"Several models are served: name one in `model`, as ?model=NAME, {BY_HAND}."
            raise invalid("model", text, "missing_required_parameter")
        return spec
