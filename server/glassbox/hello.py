"""GET /ui/api/hello: what the pages must know first."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request

from engine.protocol.ready import BATCH_VARIANCE
from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from server.api.openai.models import model_facts
from server.glassbox.access import state_for_ui
from server.glassbox.starters import starters
from server.glassbox.state import glassbox_of
from server.http.auth import is_admin
from server.http.polled import PolledRoute
from server.state import VERSION

router = APIRouter(route_class=PolledRoute)


@router.get("/ui/api/hello")
async def hello(request: Request) -> dict[str, Any]:
    """Return the model, the caller's role, and the state of the engine.

    `role` is admin or user: an admin sees the requests of all clients. `uneven` says why the last
    bits of logits depend on the other requests in a step, or is null. `ready` is all of the
    engine's facts, `stats` its state after the last step. `formats` are those of the weights
    on disk. `starters` are first prompts for the model. `sampling` are the parameters of sampling.
    `takes_images` is whether chats may have images; their bodies have `max_body_bytes` at most.
    """
    state = state_for_ui(request)
    ready = state.loaded()
    checkpoint = glassbox_of(request).checkpoint
    uneven = BATCH_VARIANCE[ready.batch_variance] if ready.batch_variance else None
    return {
        "version": VERSION,
        "role": "admin" if is_admin(request) else "user",
        "model": model_facts(state, state.names[0]),
        "has_template": state.template is not None,
        "takes_images": state.image_token is not None,
        "max_body_bytes": state.config.max_body_bytes,
        "defaults": state.tokenizer.defaults,
        "sampling": [
            {"name": name, "kind": parameter.kind, "default": DEFAULTS[name]}
            for name, parameter in PARAMETERS.items()
        ],
        "starters": starters(state, checkpoint),
        "formats": await asyncio.to_thread(checkpoint.formats, ready.weight_parts),
        "end_tokens": state.tokenizer.eos_token_ids,
        "ready": _as_object(ready),
        "stats": _as_object(state.client.stats),
        "uneven": None if uneven is None else {"why": uneven[0], "cure": uneven[1]},
    }


def _as_object(struct: msgspec.Struct) -> Any:
    """Return a struct, which messages encode as an array, as a JSON object."""
    return _plain(msgspec.structs.asdict(struct))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _as_object(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
