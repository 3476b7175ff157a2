"""Build the HTTP application around one engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from engine.checkpoint.folder import model_folder
from engine.checkpoint.sentence import SentenceConfig, read_sentence
from engine.client.interface import EngineClient
from engine.config import EngineConfig, adapter_sources
from engine.errors import ConfigError
from server.adapters import AdapterRegistry
from server.api import capabilities, docs, ops
from server.api.anthropic import messages
from server.api.cohere import wing as cohere
from server.api.llamacpp import wing as llamacpp
from server.api.openai import (
    chat,
    classify,
    completions,
    embeddings,
    lora,
    models,
    rerank,
    score,
    tokenize,
)
from server.api.prefixes.inspection import new_prompt_log
from server.api.receive import spare_threads
from server.api.responses import routes as responses
from server.api.responses.store import ResponseStore
from server.api.tei import wing as tei
from server.api.vllm import wing as vllm
from server.batch import wing as batch
from server.config import ServerConfig, served_names
from server.fingerprint import model_fingerprint
from server.generation.embedding_state import EmbeddingState, pairs_of
from server.generation.observers import spine_observers
from server.glassbox import wing as glassbox
from server.grammar.llguidance_grammar import grammar_of
from server.http.api_keys import ApiKeys
from server.http.auth import Gate
from server.http.boundary import CrossOrigin, RequestBoundary
from server.http.errors import ANTHROPIC_PATH, NO_RETRY, ApiError
from server.http.key_file import read_limited_keys
from server.http.large_bodies import LargeBodies
from server.http.openapi import RESPONSES
from server.http.openapi_app import OpenApiApp
from server.http.polled import polled_paths
from server.images.reader import image_reader
from server.ollama import wing as ollama
from server.replay import wing as replay
from server.state import VERSION, AppState
from server.telemetry.exposition import Exposition
from server.telemetry.logging import configure
from server.telemetry.metrics import Metrics
from server.telemetry.tracing import Tracing
from server.text.load_template import load_template
from server.text.load_tokenizer import load_tokenizer
from server.text.parsers.answers import answers_of

SPINE = (
    chat,
    completions,
    responses,
    messages,
    embeddings,
    score,
    rerank,
    classify,
    models,
    lora,
    tokenize,
    capabilities,
    ops,
    docs,
)
# In the order of their start, and the other way round of their end: the batches end before the
# file of --record.
WINGS = (
    replay.WING,
    batch.WING,
    cohere.WING,
    vllm.WING,
    tei.WING,
    llamacpp.WING,
    ollama.WING,
    glassbox.WING,
)
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
ROUTERS = [file.router for file in SPINE]
for _wing in WINGS:
    ROUTERS += _wing.routers
PATHS = {
    route.path
    for router in ROUTERS
    if router.include_in_schema
    for route in router.routes
    if isinstance(route, Route)
}


def create_app(
    config: ServerConfig,
    engine_config: EngineConfig,
    client: EngineClient,
    keys: ApiKeys | None = None,
) -> FastAPI:
    """Return the FastAPI application that serves `client`. `keys` are by default those of `config`.

    Reads the tokenizer, the chat template and the API keys, but not the weights. The application's
    lifespan starts and stops `client`. The server answers requests immediately; /v1 returns 503
    until the model is loaded. Raises ConfigError if one of these files cannot be used.
    """
    configure(config)
    folder = model_folder(engine_config.model)
    names = served_names(config, engine_config.model)
    adapters = AdapterRegistry(names, adapter_sources(engine_config))
    sentence = _sentence(folder, engine_config)
    tokenizer = load_tokenizer(folder, lowercase=sentence.lowercase)
    template = load_template(folder, Path(config.chat_template) if config.chat_template else None)
    answers, hermes = answers_of(
        tokenizer, template, config.tool_call_parser, config.reasoning_parser
    )
    images = image_reader(folder, tokenizer, config.image_hosts, partial(_context, client))
    if keys is None:
        keys = ApiKeys(partial(read_limited_keys, config))
    metrics = Metrics(names[0], client, VERSION)
    tracing = Tracing.from_environment(os.environ) if config.tracing else None
    state = AppState(
        config=config,
        engine_config=engine_config,
        folder=folder,
        client=client,
        tokenizer=tokenizer,
        template=template,
        answers=answers,
        hermes=hermes,
        truncate_dim=sentence.truncate_dim,
        text_limit=sentence.longest,
        read_images=images.read,
        image_token=images.token_id,
        write_grammar=partial(grammar_of, tokenizer),
        fingerprint_of=partial(model_fingerprint, VERSION),
        observers=spine_observers(metrics, tracing),
        names=names,
        adapters=adapters,
        created=int(time.time()),
        body_turn=LargeBodies().turn,
    )
    app = _application(config, client, is_keyed=bool(keys))
    app.state.penstock = state
    app.state.keys = keys
    app.state.images = images
    pairs = pairs_of(tokenizer, template, folder, sentence)
    app.state.embedding = EmbeddingState(sentence, metrics, pairs)
    _add_telemetry(app, config, metrics, tracing)
    _add_stores(app, config)
    for wing in WINGS:
        wing.install(app, state)
    _add_middleware(app, state)
    return app


def _sentence(folder: Path, config: EngineConfig) -> SentenceConfig:
    return read_sentence(folder, pooling=config.pooling, longest=config.max_model_len)


def _add_telemetry(
    app: FastAPI, config: ServerConfig, metrics: Metrics, tracing: Tracing | None
) -> None:
    app.state.metrics = metrics
    app.state.tracing = tracing
    app.state.exposition = Exposition(metrics.registry, config.metrics_compat)


def _add_stores(app: FastAPI, config: ServerConfig) -> None:
    """Add what requests leave for later ones, and the threads of routes that do not generate."""
    stored = config.response_store_bytes, config.response_store_count
    app.state.response_store = ResponseStore(*stored)
    app.state.prompt_log = new_prompt_log()
    app.state.spare_threads = spare_threads()


def _context(client: EngineClient) -> int:
    """Return the tokens of the loaded model's context."""
    assert client.info is not None, "requests are admitted once the model is loaded"
    return client.info.max_model_len


def _application(config: ServerConfig, client: EngineClient, *, is_keyed: bool) -> OpenApiApp:
    """Return the application with its routes, and no state."""
    return _routed(
        disabled=_disabled(config),
        keyed=is_keyed,
        vocab_size=lambda: client.info.vocab_size if client.info else None,
        lifespan=_lifespan,
        exception_handlers={HTTPException: _raise},
    )


def _add_middleware(app: FastAPI, spine: AppState) -> None:
    """Put the middleware before the routes: the last one added is the first to see a request."""
    config, metrics = spine.config, app.state.metrics
    app.add_middleware(Gate, config=config, keys=app.state.keys)
    app.add_middleware(
        RequestBoundary,
        config=config,
        client=spine.client,
        metrics=metrics,
        polled=polled_paths(ROUTERS),
    )
    if config.allowed_origins:  # outermost: refusals need CORS headers, too
        app.add_middleware(CrossOrigin, origins=config.allowed_origins, metrics=metrics)


def _disabled(config: ServerConfig) -> tuple[str, ...]:
    """Return the paths that the server does not offer. Raises ConfigError if one is unknown."""
    for path in config.disabled_paths:
        if path not in PATHS:
            raise ConfigError(f"--disabled-paths has {path}, which is no path of this server.")
    return config.disabled_paths


def _routed(disabled: Sequence[str] = (), **facts: Any) -> OpenApiApp:
    """Return an application with every route. `facts` are arguments of OpenApiApp."""
    app = OpenApiApp(
        disabled=disabled,
        title="Penstock",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=RESPONSES,
        **facts,
    )
    for path in disabled:  # the first route of a path has precedence
        app.add_route(path, _refuse, methods=METHODS, include_in_schema=False)
    for router in ROUTERS:
        app.include_router(router)
    return app


def api_document() -> dict[str, Any]:
    """Return the OpenAPI document of a server before its model is loaded."""
    return _routed(keyed=False, vocab_size=lambda: None).openapi()


async def _refuse(request: Request) -> Response:
    message = f"{request.url.path} is disabled on this server: see --disabled-paths."
    raise ApiError(501, "path_disabled", message, headers=NO_RETRY)


async def _raise(request: Request, error: Exception) -> Response:
    """Raise `error` again, so that RequestBoundary writes the 404 or 405 in OpenAI's format."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = _methods_of(request)
        detail = "Method Not Allowed"
        if request.method == "OPTIONS":
            detail += ": cross-origin requests from web pages require --allowed-origins"
        if request.method == "POST" and request.url.path == "/":
            # huggingface_hub posts to the URL that it is given, without adding a path.
            detail += ": the client's URL needs the path of a route, such as /embed"
        raise HTTPException(405, detail, {"Allow": ", ".join(sorted(allowed))})
    if error.status_code == 404 and (hint := _hint(request.url.path)):
        raise ApiError(404, "not_found", hint)
    raise error


def _methods_of(request: Request) -> set[str]:
    """Return the methods of the path of a request. Starlette's own answer has the first route's."""
    found: set[str] = set()
    for routes in (request.app, *ROUTERS):
        for route in routes.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
                found |= route.methods or set()
    return found | ({"HEAD"} if "GET" in found else set())  # Exchange.routed serves HEAD as GET


def _hint(path: str) -> str:
    """Return a 404 message that suggests a served path, or "" if none resembles `path`."""
    names = [name for name in path.split("/") if name not in ("", "v1")]
    meant = "/".join(["/v1", *names])
    if meant in PATHS:
        advice = "The client's base URL must end in /v1."
        if ANTHROPIC_PATH.fullmatch(meant):
            advice = "Anthropic's clients add /v1 to the base URL."
        return f"Not Found: did you mean {meant}? {advice}"
    meant = "/".join(["", *names])
    return f"Not Found: did you mean {meant}?" if meant in PATHS else ""


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.penstock
    await state.client.start()
    try:
        async with AsyncExitStack() as running:
            for wing in WINGS:
                await running.enter_async_context(wing.run(app))
            yield
    finally:
        await state.client.stop()
        if state.template:
            state.template.close()
        app.state.images.close()
        if app.state.tracing:
            await asyncio.to_thread(app.state.tracing.close)
