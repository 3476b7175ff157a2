"""Answers of the parent of several models: its state, its models, and all metrics."""

from __future__ import annotations

import asyncio
import html
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.models.catalog import ModelSpec
from server.models.counts import merged
from server.models.pool import Instance
from server.models.upstream import ConnectionLost
from server.state import VERSION

if TYPE_CHECKING:
    from server.models.front import Front

SCRAPE_S = 2.0  # for a model to answer for its metrics
RETRY = {"retry-after": "5"}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="dark light"><title>Penstock</title>
<h1>Models</h1>
<ul>
{links}
</ul>
</html>
"""


def _condition(front: Front) -> dict[str, Any]:
    return {
        "status": "ok" if front.state == "ready" else front.state,
        "models": len(front.catalog.specs),
        "loaded": len(front.pool.loaded()),
        "open_requests": front.pool.num_open,
    }


async def health(front: Front, request: Request) -> Response:
    """Return 200: a model that has ended is loaded again by its next request."""
    return JSONResponse(_condition(front))


async def ready(front: Front, request: Request) -> Response:
    """Return 200 unless the server drains. No model need be loaded."""
    body = _condition(front)
    if front.state != "ready":
        return JSONResponse(body, 503, headers=RETRY)
    return JSONResponse(body)


async def load(front: Front, request: Request) -> Response:
    return JSONResponse({"server_load": front.pool.num_open})


async def version(front: Front, request: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def metrics(front: Front, request: Request) -> Response:
    """Return the series of the parent, and those of loaded models with the label `model`."""
    found = await asyncio.gather(*[_series(instance) for instance in front.pool.loaded()])
    texts = [(name, text) for name, text in found if text]
    text = merged(front.counts.render(), texts)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _series(instance: Instance) -> tuple[str, str]:
    assert instance.upstream is not None
    try:
        async with asyncio.timeout(SCRAPE_S):
            text = await instance.upstream.get("/metrics")
    except (ConnectionLost, TimeoutError):
        return instance.spec.name, ""
    return instance.spec.name, text.decode()


async def models(front: Front, request: Request) -> Response:
    """List all models, with what their servers say about those that are loaded."""
    front.catalog.refresh()
    listed: list[dict[str, Any]] = []
    for spec in list(front.catalog.specs.values()):
        listed += await model_entries(front, spec, request)
    return JSONResponse({"object": "list", "data": listed})


async def model_entries(front: Front, spec: ModelSpec, request: Request) -> list[dict[str, Any]]:
    """Return an entry of /v1/models for each name of a model."""
    facts: dict[str, dict[str, Any]] = {}
    instance = front.pool.instances.get(spec.name)
    if instance is not None and instance.state == "loaded":
        answer = await answer_of(instance, request, "/v1/models")
        facts = {entry["id"]: entry for entry in answer.get("data", ())}
    state = {"state": "unloaded", "loaded": False, "pages": f"/model/{quote(spec.name)}/ui/"}
    if instance is not None:
        stage, fraction = instance.progress
        state |= {"state": instance.state, "loaded": instance.state == "loaded"}
        if instance.state != "loaded":
            state |= {"stage": stage, "fraction": fraction}
    entries = []
    for name in spec.names:
        basis = {
            "id": name,
            "object": "model",
            "created": front.started,
            "owned_by": "penstock",
            "root": spec.name,
            "parent": None,
        }
        entries.append(basis | facts.get(name, {}) | state)
    return entries


async def answer_of(instance: Instance, request: Request, path: str) -> dict[str, Any]:
    """Return what the server of a loaded model answers to a GET of this client; {} if nothing."""
    assert instance.upstream is not None
    access = ("authorization", "x-api-key")
    headers = [(n.encode(), v.encode()) for n, v in request.headers.items() if n in access]
    try:
        async with asyncio.timeout(SCRAPE_S):
            answer: dict[str, Any] = orjson.loads(await instance.upstream.get(path, headers))
    except (ConnectionLost, TimeoutError):
        return {}
    return answer


async def pages(front: Front, request: Request) -> Response:
    """Return the page that links to the pages of each model."""
    front.catalog.refresh()
    links = []
    for spec in front.catalog.specs.values():
        target = f"model/{quote(spec.name)}/ui/"
        if request.url.path.endswith("/ui/"):
            target = f"../{target}"
        links.append(f'<li><a href="{html.escape(target)}">{html.escape(spec.name)}</a></li>')
    headers = {"content-security-policy": "default-src 'none'", "x-content-type-options": "nosniff"}
    page = PAGE.format(links="\n".join(links))
    return Response(page, headers=headers, media_type="text/html")


def unix_seconds() -> int:
    return int(time.time())
