"""Read a JSON body with strict types and bounded sizes, and report every ignored field."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
import structlog
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from server.http.errors import ApiError, ClientGone, invalid, unsupported
from server.text import exact_json

BODY_DEADLINE = 30.0  # seconds for a body to arrive: a slow sender must not hold a connection
JSON = "application/json"
SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")
UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")
MAX_LISTED = 20
MAX_MEMBERS = 1024  # limit of an object with fields
# Lengths of strings: any one without a type of its own is a name, such as `user` or `model`.
MAX_NAME, MAX_LONG_NAME, MAX_TEXT = 1024, 64 << 10, 64 << 20  # characters
MAX_ACCEPTED = 16 << 10  # the same of a field without effect, such as metadata
MAX_SMALL = 1 << 20  # characters and values of a schema, or of all tools
MAX_PARTS = 1 << 16  # parts of one message
LARGE = 64 << 10  # bytes; parsing them takes about 2 ms in the worst case, many tiny lists
# Of a size in bytes and a tenant: the context in which a body is parsed. Large bodies wait for it.
BodyTurn = Callable[[int, str], AbstractAsyncContextManager[None]]

log = structlog.get_logger("server.schemas")


def failure(kind: Literal["invalid", "unsupported"], message: str, *path: Any) -> Exception:
    """Return a validation error for the field at `path`, relative to the raising validator."""
    return PydanticCustomError(kind, "{message}", {"message": message, "path": path})


def few(value: Any, most: int = MAX_MEMBERS, noun: str = "members") -> Any:
    """Limit the members of an object before validation: pydantic counts them after all items.

    Checking a million of them would stop every stream for a second.
    """
    if isinstance(value, dict) and len(value) > most:
        raise failure("invalid", f"may have at most {most} {noun}, not {len(value)}")
    return value


def size_of(value: Any, most: int) -> int:
    """Return the number of characters and values in a JSON value; beyond `most` any larger one."""
    size, rest = 0, [value]
    while rest and size <= most:
        part = rest.pop()
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            rest += part
            rest += part.values()
    return size


def small(value: Any, most: int = MAX_SMALL) -> Any:
    """Limit the size of a JSON value, such as a schema or all tools."""
    if size_of(value, most) > most:
        raise failure("invalid", f"may have at most {most} characters and values in total")
    return value


LongName = Annotated[str, StringConstraints(max_length=MAX_LONG_NAME)]  # an id with data in it
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]  # such as a prompt


def picture_url(url: str, *path: str) -> str:
    """Return the URL. Refuse a scheme that no picture is read from, such as file:."""
    scheme = SCHEME.match(url)
    if scheme is not None and scheme[1].lower() not in ("data", "http", "https"):
        raise failure("unsupported", f"{scheme[1]}: is not supported; send a data: URL", *path)
    return url


PictureUrl = Annotated[Text, AfterValidator(picture_url)]  # or bare base64
JsonObject = Annotated[dict[str, Any], BeforeValidator(partial(small, most=MAX_TEXT))]


class Part(BaseModel):
    """A request body, or an object inside one."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        extra="allow",
        str_max_length=MAX_NAME,
        use_attribute_docstrings=True,  # the text below a field describes it in the API's documents
    )

    @model_validator(mode="before")
    @classmethod
    def _few_members(cls, value: Any) -> Any:
        return few(value)

    def drop_unknown(self) -> list[str]:
        """Delete unknown members, here and in the parts inside, and return their names.

        They could otherwise use much memory until the answer is complete. Each name is listed once,
        as a dotted path without list indices. Members with the value null are not listed.
        """
        extra = self.model_extra or {}
        found = [name for name, value in extra.items() if value is not None]
        extra.clear()
        for name, value in self.__dict__.items():
            parts = value if isinstance(value, list) else [value]
            if parts and isinstance(parts[0], int):
                continue  # a million token ids, perhaps
            for part in parts:
                if isinstance(part, Part):
                    found += [f"{name}.{inner}" for inner in part.drop_unknown()]
        return list(dict.fromkeys(found))


class Body(Part):
    """A request body.

    `UNSUPPORTED` maps known fields that this server does not support to the values that have no
    effect; other values are refused. `HINTS` maps such fields to advice for the error message.
    `ACCEPTED` are fields that are accepted because their meaning cannot change an answer here.
    `DEFAULTS` documents the value that an absent field stands for; an absent boolean is false.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    HINTS: ClassVar[dict[str, str]] = {}
    ACCEPTED: ClassVar[frozenset[str]] = frozenset()

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    model: str | None = None
    """A name of the served model, which is also the default."""

    @model_validator(mode="before")
    @classmethod
    def _short_accepted(cls, value: Any) -> Any:
        for name in cls.ACCEPTED & value.keys() if isinstance(value, dict) else ():
            given = value[name]
            most = MAX_NAME if isinstance(given, str) else MAX_ACCEPTED
            if size_of(given, most) > most:
                raise failure("invalid", f"may have at most {most} characters", name)
        return value

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _note_unknown(self) -> Self:
        known = self.ACCEPTED | self.UNSUPPORTED.keys()
        names = [name for name in self.drop_unknown() if name not in known]
        self._ignored = [UNPRINTABLE.sub("_", name[:64]) or "_" for name in names[:MAX_LISTED]]
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields of the request; bounded, and safe for a header."""
        return self._ignored


BodyType = TypeVar("BodyType", bound=Body)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists the ignored fields, or {} if there are none."""
    return {"x-ignored-params": ", ".join(names)} if names else {}


def _same(given: Any, harmless: Any) -> bool:
    """Return whether two JSON values are equal. In JSON, 0 and 1 differ from false and true."""
    return isinstance(given, bool) == isinstance(harmless, bool) and bool(given == harmless)


async def read_body(request: Request, kind: type[BodyType], turn: BodyTurn) -> BodyType:
    """Read and validate the body of a request.

    Raises ApiError, or pydantic.ValidationError, which the error table turns into a 400. Raises
    ClientGone if the client disconnects.
    """
    # Any web page can send text/plain to this server. For JSON, browsers send a preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, "unsupported_media_type", f"The request needs `Content-Type: {JSON}`.")
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        message = f"`Content-Encoding: {coding:.40}` is not supported: send the JSON unencoded."
        plain = {"accept-encoding": "identity"}  # see RFC 9110, section 15.5.16
        raise ApiError(415, "unsupported_media_type", message, headers=plain)
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            raw = await request.body()
    except TimeoutError:
        message = f"The request body did not arrive within {BODY_DEADLINE:.0f} seconds."
        close = {"connection": "close"}  # otherwise the server would go on reading the body
        raise ApiError(408, "request_timeout", message, headers=close) from None
    except ClientDisconnect:
        raise ClientGone from None
    large = len(raw) >= LARGE
    if large:
        # Makes uvicorn resume reading; otherwise it would not notice that the client disconnects.
        await request.is_disconnected()
    async with turn(len(raw), request.state.tenant):
        if large and await request.is_disconnected():
            raise ClientGone
        body = _validated(raw, kind)
    if body.ignored:
        log.debug("unknown request fields", fields=body.ignored)
    return body


def _validated(raw: bytes, kind: type[BodyType]) -> BodyType:
    """Parse and validate a body. Raises ApiError or pydantic.ValidationError."""
    try:
        data = _parsed(raw)
    except json.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    check_supported(kind, data)
    return kind.model_validate(data)


def check_supported(kind: type[Body], data: dict[str, Any]) -> None:
    """Raise a 400 ApiError for the first field that `kind` knows and the server lacks."""
    for name, harmless in kind.UNSUPPORTED.items():
        if not any(_same(data.get(name), value) for value in (None, *harmless)):
            accepted = ", ".join(orjson.dumps(value).decode() for value in harmless if value)
            only = f"; accepted values: {accepted}" if accepted else ""
            hint = kind.HINTS.get(name, "")
            raise unsupported(name, f"{name} is not supported by this server{only}.{hint}")


def _parsed(raw: bytes) -> Any:
    """Parse JSON without garbage collection, which takes a second for millions of small lists."""
    looked = gc.isenabled()
    gc.disable()
    try:
        return exact_json.loads(raw)
    finally:
        if looked:
            gc.enable()
