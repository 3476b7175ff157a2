"""JSON answers, compressed for clients that accept it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

LEAST = 1 << 10  # bytes; a smaller answer is sent as it is
LEVEL = 5  # a megabyte takes some 20 ms


def json_response(
    request: Request, document: Any, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `document` as JSON, with gzip if the client accepts it. Takes long for megabytes."""
    content = orjson.dumps(document)
    headers = {**(headers or {}), "vary": "Accept-Encoding"}
    if len(content) >= LEAST and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(content, media_type="application/json", headers=headers)
