"""create_app: the HTTP service around one engine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.client import EngineClient
from engine.config import EngineConfig, model_folder
from server.chat_template import ChatTemplate
from server.config import ServerConfig, served_names
from server.description import RESPONSES, DescribedApp
from server.errors import ApiError
from server.keys import ApiKeys
from server.logging import configure
from server.metrics import Metrics
from server.middleware import CrossOrigin, Gate, RequestBoundary
from server.pooling import PoolingConfig
from server.routes import embeddings, generate, models, ops, tokenize
from server.service import Service
from server.tokenizer import Tokenizer
from server.tracing import Tracing

ROUTERS = [module.router for module in (generate, embeddings, models, tokenize, ops)]
# What clients may ask for by default, and what it is.
FOREIGN = {"/v1/responses": "OpenAI's Responses API", "/v1/messages": "Anthropic's API"}
PATHS = {route.path for router in ROUTERS for route in router.routes if isinstance(route, Route)}


def create_app(config: ServerConfig, engine_config: EngineConfig, client: EngineClient) -> FastAPI:
    """Reads tokenizer, template and keys, not the weights. The app starts `client` with its
    lifespan and answers at once; until the model is loaded, /v1 is a 503. Raises ConfigError."""
    configure(config)
    version = importlib.metadata.version("penstock")
    folder = model_folder(engine_config.model)
    override = Path(config.chat_template) if config.chat_template else None
    names = served_names(config, engine_config.model)
    service = Service(
        config=config,
        client=client,
        keys=ApiKeys(config),
        tokenizer=Tokenizer.from_folder(folder),
        template=ChatTemplate.from_folder(folder, override),
        pooling=PoolingConfig.from_folder(folder, engine_config.max_model_len),
        metrics=Metrics(names[0], client, version, config.metrics_compat),
        tracing=Tracing.from_environment(os.environ) if config.tracing else None,
        names=names,
        created=int(time.time()),
    )
    app = DescribedApp(
        keyed=bool(service.keys),
        title="Penstock",
        version=version,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=RESPONSES,
        exception_handlers={HTTPException: _raise},
    )
    app.state.service = service
    app.state.most_connections = math.inf  # until `run` has asked how many files may be open
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Gate, config=config, keys=service.keys)
    app.add_middleware(RequestBoundary, service=service)
    if config.allowed_origins:  # outermost: a page may read refusals, too
        app.add_middleware(CrossOrigin, service=service)
    return app


async def _raise(request: Request, error: Exception) -> Response:
    """FastAPI's own answers to 404 and 405 have another shape: the boundary writes ours."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and (hint := _hint(request.url.path)):
        raise ApiError(404, "not_found", hint)
    if error.status_code == 405:
        allowed = set((error.headers or {})["Allow"].split(", "))
        allowed |= {"HEAD"} if "GET" in allowed else set()  # see Exchange.routed
        detail = error.detail
        if request.method == "OPTIONS":
            detail += ": pages of other origins may ask with --allowed-origins only"
        raise HTTPException(405, detail, {"Allow": ", ".join(sorted(allowed))})
    raise error


def _hint(path: str) -> str:
    """What to ask instead of a path that is not served, where that can be guessed."""
    names = [name for name in path.split("/") if name not in ("", "v1")]
    meant = "/".join(["/v1", *names])
    if meant in FOREIGN:
        return f"{FOREIGN[meant]} is not served here: ask /v1/chat/completions."
    if meant in PATHS:
        return f"Not Found: did you mean {meant}? A client's base URL ends in /v1 here."
    meant = "/".join(["", *names])
    return f"Not Found: did you mean {meant}?" if meant in PATHS else ""


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.client.start()
    try:
        yield
    finally:
        await service.client.stop()
        if service.tracing:
            await asyncio.to_thread(service.tracing.close)
