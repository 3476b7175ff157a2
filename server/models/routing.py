"""Which model a request is for: by the path, by `model`, or by the id of a stored object."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from server.http.errors import ApiError, ClientGone, invalid
from server.models.catalog import Catalog, ModelSpec
from server.models.pool import ModelPool
from server.models.upstream import ConnectionLost

PREFIX = "/model/"  # /model/NAME/PATH is the PATH of a model's own server
JSON = "application/json"
BODY_DEADLINE = 60.0  # seconds for a body to arrive
STORED = re.compile(r"/v1/(responses|files|batches)/([A-Za-z0-9_-]+)(?:/[a-z_]+)?")
NO_IDS = ("compact", "input_tokens")  # paths behind /v1/responses/ that are no ids
BY_HAND = "or use the paths of one model below /model/NAME/; GET /v1/models lists the names"


class Named(msgspec.Struct):
    """The fields of a body that name a model. Others are skipped."""

    model: str | None = None
    name: str | None = None  # Ollama's older spelling
    input_file_id: str | None = None  # of a new batch


def split_prefix(catalog: Catalog, scope: Scope) -> tuple[ModelSpec, Scope] | None:
    """Return the model of a path below /model/ and the scope of the path behind its name.

    None: the path has no such prefix, or no model has the name.
    """
    path: str = scope["path"]
    if not path.startswith(PREFIX):
        return None
    rest = path.removeprefix(PREFIX)
    places = [match.start() for match in re.finditer("/", rest)]
    for end in places:  # names may have slashes
        spec = catalog.find(rest[:end]) if end else None
        if spec is not None:
            inner = rest[end:]
            return spec, {**scope, "path": inner, "raw_path": _raw(scope, inner)}
    return None


def _raw(scope: Scope, inner: str) -> bytes:
    """Return the end of the raw path whose decoded form is `inner`."""
    raw: bytes = scope["raw_path"]
    for match in re.finditer(rb"/", raw):
        end = raw[match.start() :]
        if unquote(end.decode("latin-1")) == inner:
            return end
    return inner.encode()


def queried(catalog: Catalog, scope: Scope) -> ModelSpec | None:
    """Return the model of the parameter `model`, if there is one. Raises a 404 ApiError."""
    if b"model=" not in scope["query_string"]:
        return None
    names = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return by_name(catalog, unquote(names[0])) if names else None


def by_name(catalog: Catalog, name: str) -> ModelSpec:
    """Return the model of a name. Raises a 404 ApiError."""
    if (spec := catalog.find(name)) is None:
        raise unknown_model(name)
    return spec


def unknown_model(name: str) -> ApiError:
    text = f"The model {name[:200]!r} does not exist. GET /v1/models lists the names."
    return ApiError(404, "model_not_found", text, param="model")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body of a request. Raises a 408 ApiError, and ClientGone."""
    parts = []
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        text = f"The request body did not arrive within {BODY_DEADLINE:.0f} seconds."
        raise ApiError(408, "request_timeout", text, headers={"connection": "close"}) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def named(scope: Scope, body: bytes) -> Named:
    """Return the fields of a JSON body that name a model. Raises a 415 or 400 ApiError."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    # Any web page can send text/plain to this server. For JSON, browsers send a preflight request.
    if kind != JSON:
        raise ApiError(415, "unsupported_media_type", f"The request needs `Content-Type: {JSON}`.")
    try:
        return msgspec.json.decode(body, type=Named)
    except msgspec.ValidationError as error:
        raise invalid("model", f"The body does not name a model: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"The body is not valid JSON: {error}.") from None


async def by_id(
    catalog: Catalog, pool: ModelPool, batch_dir: str | None, scope: Scope
) -> ModelSpec | None:
    """Return the model that made the stored object of a path; None if the path names none.

    Raises a 404 ApiError if no model has the object.
    """
    match = STORED.fullmatch(scope["path"])
    if match is None or match[2] in NO_IDS:
        return None
    kind, found = match[1], match[2]
    if kind == "responses":
        spec = await _with_response(pool, found, scope)
    else:
        spec = with_file(catalog, batch_dir, kind, found)
    if spec is None:
        text = f"No model has {found}. Stored responses end with the process of their model."
        raise ApiError(404, "not_found", text)
    return spec


async def _with_response(pool: ModelPool, response_id: str, scope: Scope) -> ModelSpec | None:
    """Ask the loaded models for a stored response: it is in the memory of the one that made it."""
    access = (b"authorization", b"x-api-key")
    headers = [header for header in scope["headers"] if header[0] in access]
    for instance in pool.loaded():
        assert instance.upstream is not None
        try:
            await instance.upstream.get(f"/v1/responses/{response_id}", headers)
        except ConnectionLost:
            continue
        return instance.spec
    return None


def with_file(catalog: Catalog, batch_dir: str | None, kind: str, found: str) -> ModelSpec | None:
    """Return the model in whose folder of --batch-dir a file or batch is."""
    if batch_dir is None or not STORED.fullmatch(f"/v1/{kind}/{found}"):
        return None
    for spec in catalog.specs.values():
        if Path(batch_dir, spec.folder_name, kind, f"{found}.json").is_file():
            return spec
    return None
