"""The built-in pages: static files of server/ui, and GET / that leads to them.

The files hold no data, so they need no key; the Host check stays. They are read and compressed once
and served from memory. The pages are plain ES modules: there is no build step.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from server.http.addresses import serves_ui
from server.http.auth import is_page
from server.http.compression import accepts_gzip
from server.state import state_of

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time, and get a 304: files change with the version
    "vary": "Accept-Encoding",
}


class PageRoute(APIRoute):
    """A route that leaves paths below /ui/api/ to other routes, in any order of the routers.

    Without it, the route of all files would answer for a data route that is listed after it.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not is_page(scope["path"]):
            return Match.NONE, {}
        return super().matches(scope)


router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the pages, as it is and compressed."""

    media_type: str
    content: bytes
    compressed: bytes
    tag: str  # the ETag of both forms; weak, because they differ in bytes


@functools.cache
def page_files() -> Mapping[str, File]:
    """Return all files by their paths below /ui/."""
    return dict(_read(files("server") / "ui", ""))


def _read(folder: Traversable, prefix: str) -> dict[str, File]:
    found: dict[str, File] = {}
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_dir():
            found |= _read(entry, f"{prefix}{entry.name}/")
        elif suffix in TYPES:
            content = entry.read_bytes()
            tag = f'W/"{hashlib.sha256(content).hexdigest()[:16]}"'
            compressed = gzip.compress(content, 9, mtime=0)
            found[prefix + entry.name] = File(TYPES[suffix], content, compressed, tag)
    return found


@router.get("/")
async def root(request: Request) -> Response:
    """Lead browsers to the pages, and tell API clients where things are."""
    has_pages = serves_ui(state_of(request).config)
    if has_pages and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("ui/", 307)
    links: dict[str, Any] = {
        "name": "penstock",
        "api": "/v1",
        "docs": "/docs",
        "openapi": "/openapi.json",
        "capabilities": "/capabilities",
        "metrics": "/metrics",
        "health": "/health",
    }
    return JSONResponse(links | ({"ui": "/ui/"} if has_pages else {}), headers={"vary": "Accept"})


@router.get("/ui")
async def without_slash() -> Response:
    """Add the slash that relative addresses need."""
    return RedirectResponse("ui/", 307)


@router.get("/ui/{path:path}")
async def page(request: Request, path: str) -> Response:
    """Return a file of the pages."""
    if not serves_ui(state_of(request).config):
        raise HTTPException(404)
    files_by_path = await asyncio.to_thread(page_files)  # the first call reads and compresses
    found = files_by_path.get(path or "index.html")
    if found is None:
        raise HTTPException(404)
    headers = HEADERS | {"etag": found.tag}
    if found.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if not accepts_gzip(request):
        return Response(found.content, media_type=found.media_type, headers=headers)
    headers["content-encoding"] = "gzip"
    return Response(found.compressed, media_type=found.media_type, headers=headers)
