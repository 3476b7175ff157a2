"""The routes of Ollama's API about models: the served one is listed, and nothing is changed."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.models import model_facts
from server.generation.infill import infill_tokens
from server.http.body import Body, read_body
from server.http.errors import ApiError, unsupported
from server.http.openapi import body_schema
from server.ollama.lines import timestamp, whole_or_lines
from server.ollama.receive import lines_schema, served_name
from server.state import OLLAMA_VERSION, VERSION, AppState, state_of

router = APIRouter()
Json = dict[str, Any]
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
KINDS = re.compile(r"(For[A-Z]|Model$|LMHead).*")  # ends of the names of architectures
CAPABILITIES = ("completion", "tools", "vision", "thinking", "embedding")  # in Ollama's words
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class NameBody(Body):
    """A body that names a model."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        ("verbose", "insecure", "system", "template", "options", "username", "password")
    )

    model: str | None = Field(None, validation_alias=AliasChoices("model", "name"))
    """A name of the served model."""
    stream: bool | None = None
    """Send the answer as lines of JSON."""


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the version of Ollama's API that is served, and Penstock's own."""
    return {"version": OLLAMA_VERSION, "penstock": VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List the served model under each of its names, and its LoRA adapters."""
    state = state_of(request)
    return {"models": [_listed(state, name) for name in _names(state)]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, Any]:
    """List the loaded model, which is the served one, as often as `/api/tags` does."""
    state = state_of(request)
    info = state.loaded()
    on_gpu = info.weight_bytes if info.device.startswith("cuda") else 0
    more = {"expires_at": NEVER, "size_vram": on_gpu, "context_length": state.max_length()}
    listed = [_listed(state, name) | more for name in _names(state)]
    for each in listed:
        del each["modified_at"]
    return {"models": listed}


@router.post("/api/show", openapi_extra=body_schema(NameBody))
async def show(request: Request) -> Response:
    """Describe the served model."""
    state = state_of(request)
    state.loaded()
    body = await read_body(request, NameBody, state.body_turn)
    name = served_name(state, body.model)
    return whole_or_lines([_shown(state, name)], is_streamed=False)


@router.post("/api/pull", openapi_extra=lines_schema(NameBody, task=None))
async def pull(request: Request) -> Response:
    """Confirm that the served model is there. The server downloads no other one."""
    state = state_of(request)
    state.loaded()
    body = await read_body(request, NameBody, state.body_turn)
    try:
        served_name(state, body.model)
    except ApiError as error:
        message = (
            f"{error.message} This server downloads none: run `penstock pull ORG/NAME` and "
            "`penstock serve ORG/NAME`."
        )
        raise unsupported("model", message) from None
    steps: list[Json] = [{"status": "pulling manifest"}, {"status": "success"}]
    return whole_or_lines(steps, is_streamed=body.stream is not False)


@router.delete("/api/delete")
async def delete() -> None:
    """Refuse: the server deletes no files."""
    message = (
        "model: this server deletes no models. Stop it, and delete the model's folder; "
        "`penstock list` shows the downloaded ones."
    )
    raise unsupported("model", message)


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
async def create() -> None:
    """Refuse, as /api/copy and /api/push do: a model is made where the server is started."""
    message = (
        "model: this server makes, copies and sends no models. `penstock serve` has "
        "--served-model-name for another name, and --lora-modules for adapters."
    )
    raise unsupported("model", message)


def _names(state: AppState) -> list[str]:
    return [*state.names, *(adapter.name for adapter in state.adapters)]


def _listed(state: AppState, name: str) -> Json:
    """Return the entry of a list. Names stand as they are, without `:latest`."""
    info = state.loaded()
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(state),
        "size": info.weight_bytes,
        "digest": _digest(state, name),
        "details": _details(state),
    }


def _modified_at(state: AppState) -> str:
    return timestamp(datetime.fromtimestamp(state.created, UTC))


def _digest(state: AppState, name: str) -> str:
    """Return 64 hexadecimal digits that are equal for equal models and versions."""
    fingerprint = state.fingerprint_of(state.loaded(), state.adapters.find(name))
    return hashlib.sha256(fingerprint.encode()).hexdigest()


def _family(state: AppState) -> str:
    """Return the architecture in lower case, without what it is for, such as "llama"."""
    return KINDS.sub("", state.loaded().architecture).lower() or "unknown"


def _details(state: AppState) -> Json:
    info = state.loaded()
    family = _family(state)
    is_gguf = any(state.folder.glob("*.gguf")) or state.folder.suffix == ".gguf"
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(info.parameters),
        "quantization_level": (info.quantization or DTYPES.get(info.dtype, info.dtype)).upper(),
    }


def _rounded(parameters: int) -> str:
    """Return a number of parameters as Ollama shows it, such as "1.7B"."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _shown(state: AppState, name: str) -> Json:
    family, info = _family(state), state.loaded()
    size = state.vector_size()
    model_info: Json = {
        "general.architecture": family,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": state.max_length(),
    }
    if size:
        model_info[f"{family}.embedding_length"] = size
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": _parameters(state),
        "template": state.template.source if state.template else "",
        "license": "",
        "details": _details(state),
        "model_info": model_info,
        "capabilities": _capabilities(state, name),
        "modified_at": _modified_at(state),
    }


def _parameters(state: AppState) -> str:
    """Return the context, and the sampling parameters of the checkpoint, a line for each."""
    given = {"num_ctx": state.max_length(), **state.tokenizer.defaults}
    named = {"repetition_penalty": "repeat_penalty"}
    lines = [f"{named.get(name, name):<30} {json.dumps(value)}" for name, value in given.items()]
    return "\n".join(lines)


def _capabilities(state: AppState, name: str) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    has = model_facts(state, name)["capabilities"]
    found = [word for word in CAPABILITIES if word in has]
    if state.task == "generate" and infill_tokens(state.tokenizer) is not None:
        found.append("insert")
    return found
