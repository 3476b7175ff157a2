"""Reading a JSON body: strict types, bounded numbers, nothing dropped unseen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import orjson
import structlog
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, ClientGone, invalid, unsupported

BODY_DEADLINE = 30.0  # seconds for a body to arrive: a slow sender must not hold a connection
JSON = "application/json"
UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")
MAX_LISTED = 20

log = structlog.get_logger("server.schemas")


class Part(BaseModel):
    """A body, or an object inside of one."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")

    def unknown(self) -> list[str]:
        """Members nobody knows, each once, with their paths but without indices. A null asks for
        nothing."""
        found = [name for name, value in (self.model_extra or {}).items() if value is not None]
        for name, value in self.__dict__.items():
            parts = value if isinstance(value, list) else [value]
            if parts and isinstance(parts[0], Part):
                found += [f"{name}.{inner}" for part in parts for inner in part.unknown()]
        return list(dict.fromkeys(found))


class Body(Part):
    """A request body. `UNSUPPORTED` maps known fields this server cannot honour to the values
    that ask for nothing, and `HINTS` to what a user can do; `ACCEPTED` are fields that by their
    meaning change no answer here."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    HINTS: ClassVar[dict[str, str]] = {}
    ACCEPTED: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None

    def ignored(self) -> list[str]:
        """Fields of the request that nobody knows; bounded and safe for a header."""
        known = self.ACCEPTED | self.UNSUPPORTED.keys()
        names = [name for name in self.unknown() if name not in known]
        return [UNPRINTABLE.sub("_", name[:64]) or "_" for name in names[:MAX_LISTED]]


BodyType = TypeVar("BodyType", bound=Body)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names what was not applied; none where all was."""
    return {"x-ignored-params": ", ".join(names)} if names else {}


def _same(given: Any, harmless: Any) -> bool:
    """For Python 0 is False and 1 is True: a request for 0 of something is not one for none."""
    return isinstance(given, bool) == isinstance(harmless, bool) and bool(given == harmless)


async def read_body(request: Request, kind: type[BodyType]) -> BodyType:
    """Raises ApiError or pydantic.ValidationError, which the error table turns into a 400."""
    # Any web page may send text/plain here; for JSON the browser would ask us first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, "unsupported_media_type", f"The request needs `Content-Type: {JSON}`.")
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        message = f"`Content-Encoding: {coding:.40}` is not read here: send the JSON as it is."
        plain = {"accept-encoding": "identity"}  # as RFC 9110, section 15.5.16, has it
        raise ApiError(415, "unsupported_media_type", message, headers=plain)
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            raw = await request.body()
    except TimeoutError:
        message = f"The request body did not arrive within {BODY_DEADLINE:.0f} seconds."
        raise ApiError(408, "request_timeout", message) from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    for name, harmless in kind.UNSUPPORTED.items():
        if not any(_same(data.get(name), value) for value in (None, *harmless)):
            only = [f", only {orjson.dumps(value).decode()} is" for value in harmless if value]
            hint = kind.HINTS.get(name, "")
            raise unsupported(name, f"{name} is not supported by this server{''.join(only)}.{hint}")
    body = kind.model_validate(data)
    if ignored := body.ignored():
        log.debug("unknown request fields", fields=ignored)
    return body
