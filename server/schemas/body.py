"""Reading a JSON body: strict types, bounded numbers, nothing dropped unseen."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import orjson
import structlog
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, ClientGone, invalid, unsupported

BODY_DEADLINE = 30.0  # seconds for a body to arrive: a slow sender must not hold a connection
JSON = "application/json"
UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")
MAX_LISTED = 20
MOST_MEMBERS = 1024  # of an object with fields
LARGE = 64 << 10  # bytes; of the smallest lists, so many take some 2 ms
PAUSE = 3  # times as long as a large body took, before the next one's turn

log = structlog.get_logger("server.schemas")


def failure(kind: Literal["invalid", "unsupported"], message: str, *path: Any) -> Exception:
    """A validation error of the field at `path`, seen from where it is raised."""
    return PydanticCustomError(kind, "{message}", {"message": message, "path": path})


class Part(BaseModel):
    """A body, or an object inside of one."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _few_members(cls, value: Any) -> Any:
        """A million would hold up every stream for a second."""
        if isinstance(value, dict) and len(value) > MOST_MEMBERS:
            raise failure("invalid", f"may have {MOST_MEMBERS} members, not {len(value)}")
        return value

    def drop_unknown(self) -> list[str]:
        """Lets go of members nobody knows, which could hold much memory while the answer is made.
        Returns their names, each once, with their paths but without indices. A null asks for
        nothing."""
        extra = self.model_extra or {}
        found = [name for name, value in extra.items() if value is not None]
        extra.clear()
        for name, value in self.__dict__.items():
            parts = value if isinstance(value, list) else [value]
            if parts and isinstance(parts[0], Part):
                found += [f"{name}.{inner}" for part in parts for inner in part.drop_unknown()]
        return list(dict.fromkeys(found))


class Body(Part):
    """A request body. `UNSUPPORTED` maps known fields this server cannot honour to the values
    that ask for nothing, and `HINTS` to what a user can do; `ACCEPTED` are fields that by their
    meaning change no answer here."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    HINTS: ClassVar[dict[str, str]] = {}
    ACCEPTED: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _note_unknown(self) -> Self:
        known = self.ACCEPTED | self.UNSUPPORTED.keys()
        names = [name for name in self.drop_unknown() if name not in known]
        self._ignored = [UNPRINTABLE.sub("_", name[:64]) or "_" for name in names[:MAX_LISTED]]
        return self

    @property
    def ignored(self) -> list[str]:
        """Fields of the request that nobody knows; bounded and safe for a header."""
        return self._ignored


BodyType = TypeVar("BodyType", bound=Body)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names what was not applied; none where all was."""
    return {"x-ignored-params": ", ".join(names)} if names else {}


def _same(given: Any, harmless: Any) -> bool:
    """For Python 0 is False and 1 is True: a request for 0 of something is not one for none."""
    return isinstance(given, bool) == isinstance(harmless, bool) and bool(given == harmless)


class LargeBodies:
    """Reading megabytes of JSON keeps the event loop from the streams: large bodies are read one
    at a time, and after each the others have three times as long as it took."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """For a body of `size` bytes; a small one does not wait."""
        if size < LARGE:
            yield
            return
        await self._lock.acquire()
        begin = time.perf_counter()
        try:
            yield
        finally:
            rest = PAUSE * (time.perf_counter() - begin)
            asyncio.get_running_loop().call_later(rest, self._lock.release)


async def read_body(request: Request, kind: type[BodyType], turns: LargeBodies) -> BodyType:
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
        close = {"connection": "close"}  # or the rest would be read on for as long as it comes
        raise ApiError(408, "request_timeout", message, headers=close) from None
    except ClientDisconnect:
        raise ClientGone from None
    large = len(raw) >= LARGE
    if large:
        await request.is_disconnected()  # has uvicorn read on, or it would not see the client leave
    async with turns.turn(len(raw)):
        if large and await request.is_disconnected():
            raise ClientGone
        body = _validated(raw, kind)
    if body.ignored:
        log.debug("unknown request fields", fields=body.ignored)
    return body


def _validated(raw: bytes, kind: type[BodyType]) -> BodyType:
    try:
        data = _parsed(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    for name, harmless in kind.UNSUPPORTED.items():
        if not any(_same(data.get(name), value) for value in (None, *harmless)):
            only = [f", only {orjson.dumps(value).decode()} is" for value in harmless if value]
            hint = kind.HINTS.get(name, "")
            raise unsupported(name, f"{name} is not supported by this server{''.join(only)}.{hint}")
    return kind.model_validate(data)


def _parsed(raw: bytes) -> Any:
    """Of millions of small lists, a second would go into looking for circles among them."""
    looked = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        if looked:
            gc.enable()
