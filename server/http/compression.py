"""Compressed answers: which clients accept them, and JSON compressed for clients that accept it."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

# A coding that is refused has the weight 0: see RFC 9110, section 12.5.3.
GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:,|$|;(?!\s*q=0(?:\.0*)?\s*(?:,|$)))", re.IGNORECASE)
LEAST = 1 << 10  # bytes; a smaller answer is sent as it is
LEVEL = 5  # a megabyte takes some 20 ms


def accepts_gzip(request: Request) -> bool:
    """Whether the client takes an answer with gzip."""
    return GZIP.search(request.headers.get("accept-encoding", "")) is not None


def json_response(
    request: Request, document: Any, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `document` as JSON, with gzip if the client accepts it. Takes long for megabytes."""
    content = orjson.dumps(document)
    headers = {**(headers or {}), "vary": "Accept-Encoding"}
    if len(content) >= LEAST and accepts_gzip(request):
        content = gzip.compress(content, LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(content, media_type="application/json", headers=headers)
