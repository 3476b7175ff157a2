"""Lines of JSON, as Ollama's streams consist of."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from server.generation.options import GenerationOptions
from server.http.openapi import LINES
from server.text import exact_json

Json = dict[str, Any]


def line(value: Json) -> bytes:
    """Return a line of a stream.

    It is ASCII: clients that split text into lines would split at a raw U+2028 or U+0085.
    """
    return exact_json.text(value, separators=(",", ":")).encode() + b"\n"


def now() -> str:
    """Return the time in the format of RFC 3339, in UTC."""
    return timestamp(datetime.now(UTC))


def timestamp(time: datetime) -> str:
    """Return a time in UTC in the format of RFC 3339."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1_000_000)


def as_lines(response: Response, options: GenerationOptions) -> Response:
    """Return a response with the media type of lines, if it is a stream."""
    if options.stream:
        response.headers["content-type"] = LINES
    return response


def whole_or_lines(values: list[Json], *, is_streamed: bool) -> Response:
    """Return the response with all `values` as lines, or with the last one alone."""
    if is_streamed:
        return Response(b"".join(map(line, values)), media_type=LINES)
    return Response(exact_json.dumps(values[-1]), media_type="application/json")
