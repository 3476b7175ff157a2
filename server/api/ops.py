"""Liveness, readiness, metrics and version. None of these routes waits for the engine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.errors import EngineError
from server.http.api_keys import keys_of
from server.http.openapi import PROBE
from server.state import AppState, state_of
from server.telemetry.exposition import Exposition

LIMITED_AGE_S = 1.0  # of the metrics that a key with limits reads

RETRY = {"retry-after": "5"}  # of a probe that failed
router = APIRouter()


def _condition(state: AppState) -> dict[str, Any]:
    client = state.client
    return {
        "status": {"ready": "ok"}.get(client.state, client.state),
        "running": client.stats.running,
        "waiting": client.stats.waiting,
        "last_step_age_s": round(client.last_step_age(), 3),
    }


def _progress(state: AppState) -> dict[str, Any]:
    progress = state.client.progress
    return {"stage": progress.stage, "fraction": progress.fraction}


@router.get("/health", openapi_extra=PROBE)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """Return 200 unless the engine is dead. A hung engine is killed, so it also counts as dead."""
    state = state_of(request)
    body = _condition(state)
    if body["status"] == "loading":
        body |= _progress(state)
    return _answer(body, is_up=body["status"] != "dead")


@router.get("/ready", openapi_extra=PROBE)
async def ready(request: Request) -> Response:
    """Return 200 if a new request would be accepted: loaded, not draining, room in the queue."""
    state = state_of(request)
    body = _condition(state) | _progress(state)
    if body["status"] == "ok":
        try:
            state.client.admit()
        except EngineError:
            body["status"] = "overloaded"
    return _answer(body, is_up=body["status"] == "ok")


def _answer(body: dict[str, Any], *, is_up: bool) -> Response:
    return JSONResponse(body) if is_up else JSONResponse(body, 503, headers=RETRY)


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return the number of requests that run or wait, as in vLLM."""
    stats = state_of(request).client.stats
    return {"server_load": stats.running + stats.waiting}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    keys = keys_of(request.app)
    # Making the text takes milliseconds, and counts as no request of a key.
    is_limited = keys.limiter(keys.owner(request.state.tenant)) is not None
    exposition: Exposition = request.app.state.exposition
    text = exposition.render(LIMITED_AGE_S if is_limited else 0.0)
    response = Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
    response.raw_headers += exposition.headers
    return response


@router.get("/version")
async def version(request: Request) -> dict[str, str]:
    """Return the version of the server."""
    return {"version": request.app.version}
