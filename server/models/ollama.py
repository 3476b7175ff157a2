"""Ollama's routes that are about all models: the lists, the version, and what changes models.

Its other routes name a model, so they are forwarded to that model's server.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.checkpoint.folder import weight_files
from engine.errors import ConfigError
from server.http.errors import unsupported
from server.models.catalog import ModelSpec
from server.models.own import answer_of
from server.models.pool import Instance
from server.state import OLLAMA_VERSION, VERSION

if TYPE_CHECKING:
    from server.models.front import Front

EMPTY: dict[str, dict[str, Any]] = {  # answers to bodies without a prompt, by their path
    "/api/chat": {"message": {"role": "assistant", "content": ""}},
    "/api/generate": {"response": ""},
}
NEVER = "9999-12-31T23:59:59Z"  # when a model without --keep-alive is unloaded


class Unload(msgspec.Struct):
    """The fields by which a body asks to unload its model. Others are skipped."""

    keep_alive: float | str | None = None
    prompt: object = None
    suffix: object = None
    images: object = None
    messages: object = None

    @property
    def is_meant(self) -> bool:
        """Whether the body has no prompt, and a `keep_alive` of 0 in any unit."""
        if self.prompt or self.suffix or self.images or self.messages:
            return False
        return str(self.keep_alive).rstrip("smh") in ("0", "0.0")


def asks_to_unload(path: str, body: bytes) -> bool:
    """Whether a POST asks to unload the model that it names."""
    if path not in EMPTY or b"keep_alive" not in body:
        return False
    try:
        return msgspec.json.decode(body, type=Unload).is_meant
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the model's server says what is wrong


async def unload(front: Front, spec: ModelSpec, path: str) -> Response:
    """Unload a model at the end of its open requests. The answer does not wait for these."""
    await front.pool.unload(spec)
    created = datetime.datetime.now(datetime.UTC).isoformat()
    done = {"done": True, "done_reason": "unload"}
    return JSONResponse({"model": spec.name, "created_at": created, **EMPTY[path], **done})


async def tags(front: Front, request: Request) -> Response:
    """List all models, each under all its names, as the server of one model does."""
    front.catalog.refresh()
    models = []
    for spec in list(front.catalog.specs.values()):
        facts = {}
        instance = front.pool.instances.get(spec.name)
        if instance is not None and instance.state == "loaded":
            facts = await _described(instance, request, "/api/tags")
        size, modified_at = _size_and_time(spec)
        for name in spec.names:
            entry = _entry(name, size) | facts.get(name, {})
            models.append(entry | {"modified_at": modified_at})
    return JSONResponse({"models": models})


async def running(front: Front, request: Request) -> Response:
    """List the loaded models, each under all its names."""
    models = []
    for instance in front.pool.loaded():
        facts = await _described(instance, request, "/api/ps")
        for name in instance.spec.names:
            entry = _entry(name, instance.num_bytes) | {"size_vram": 0} | facts.get(name, {})
            models.append(entry | {"expires_at": _expiry(instance)})
    return JSONResponse({"models": models})


async def version(front: Front, request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION, "penstock": VERSION})


async def refuse(front: Front, request: Request) -> Response:
    """Refuse to delete, create, copy or push a model."""
    message = (
        "model: this server changes no models. Their folders and the file of --models-file say "
        "what is served; a table of that file has aliases and settings."
    )
    raise unsupported("model", message)


async def _described(instance: Instance, request: Request, path: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a model's own list by name; none if it does not answer."""
    answer = await answer_of(instance, request, path)
    return {entry["name"]: entry for entry in answer.get("models", ())}


def _size_and_time(spec: ModelSpec) -> tuple[int, str]:
    """Return the bytes of a model's weight files, and when they were changed."""
    from engine.checkpoint.folder import model_folder

    size, modified = 0, 0.0
    try:
        for file in weight_files(model_folder(spec.engine.model)):
            stat = file.stat()
            size += stat.st_size
            modified = max(modified, stat.st_mtime)
    except (ConfigError, OSError):
        pass  # damaged or deleted; a request for it gets an error
    return size, datetime.datetime.fromtimestamp(modified, datetime.UTC).isoformat()


def _entry(name: str, size: int) -> dict[str, Any]:
    """Return a model as Ollama lists it, by what is known before it is loaded.

    Names stand as they are, without `:latest`: `codex --oss` compares them letter by letter. The
    digest is empty: weights are not hashed for a list.
    """
    details = {"format": "", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": name,
        "model": name,
        "size": size,
        "digest": "",
        "details": {**details, "parent_model": "", "quantization_level": ""},
    }


def _expiry(instance: Instance) -> str:
    """Return when a loaded model is unloaded if it gets no further request."""
    keep = instance.spec.keep_alive
    if keep is None:
        return NEVER
    if instance.leases == 0:
        keep -= asyncio.get_running_loop().time() - instance.last_used
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=max(keep, 0.0))
    return expires.isoformat()


ANSWERS = {
    ("GET", "/api/tags"): tags,
    ("GET", "/api/ps"): running,
    ("GET", "/api/version"): version,
    ("DELETE", "/api/delete"): refuse,
    ("POST", "/api/create"): refuse,
    ("POST", "/api/copy"): refuse,
    ("POST", "/api/push"): refuse,
}
