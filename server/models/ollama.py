"""Ollama's routes that are about all models: the list, those that are loaded, and the version.

Its other routes name a model, so they are forwarded to that model's server.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.checkpoint.folder import weight_files
from engine.errors import ConfigError
from server.models.catalog import LATEST, ModelSpec
from server.state import VERSION

if TYPE_CHECKING:
    from server.models.front import Front


async def tags(front: Front, request: Request) -> Response:
    """List all models."""
    front.catalog.refresh()
    return JSONResponse({"models": [_entry(spec) for spec in front.catalog.specs.values()]})


async def running(front: Front, request: Request) -> Response:
    """List the loaded models."""
    now = datetime.datetime.now(datetime.UTC)
    models = []
    for instance in front.pool.loaded():
        keep = instance.spec.keep_alive
        expires = now + datetime.timedelta(seconds=keep if keep is not None else 86400 * 365)
        entry = _entry(instance.spec)
        entry |= {"expires_at": expires.isoformat(), "size": instance.num_bytes, "size_vram": 0}
        models.append(entry)
    return JSONResponse({"models": models})


async def version(front: Front, request: Request) -> Response:
    return JSONResponse({"version": VERSION})


def _entry(spec: ModelSpec) -> dict[str, Any]:
    """Return a model as Ollama lists it. The digest is empty: weights are not hashed for a list."""
    from engine.checkpoint.folder import model_folder

    size, modified = 0, 0.0
    try:
        for file in weight_files(model_folder(spec.engine.model)):
            stat = file.stat()
            size += stat.st_size
            modified = max(modified, stat.st_mtime)
    except (ConfigError, OSError):
        pass  # damaged or deleted; a request for it gets an error
    name = spec.name if ":" in spec.name else spec.name + LATEST
    details = {"format": "", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.datetime.fromtimestamp(modified, datetime.UTC).isoformat(),
        "size": size,
        "digest": "",
        "details": {**details, "parent_model": "", "quantization_level": ""},
    }


ANSWERS = {
    ("GET", "/api/tags"): tags,
    ("GET", "/api/ps"): running,
    ("GET", "/api/version"): version,
}
