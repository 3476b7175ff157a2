"""GET /ui/api/model: the blocks of the served model, its memory, and how it is set up."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request

from engine.protocol.ready import BATCH_VARIANCE, MemoryEntry
from engine.protocol.structure import AttentionFacts, ModelBox
from server.glassbox.access import state_for_ui
from server.glassbox.model.structure import StructureError
from server.glassbox.state import glassbox_of
from server.http.auth import is_admin
from server.http.errors import ApiError

router = APIRouter()


@router.get("/ui/api/model")
async def model(request: Request) -> dict[str, Any]:
    """Return what the model is made of.

    `boxes` are in the order of computation; `inputs` are indices of boxes, and a path in `name`
    says what is inside of what. Of equal blocks only the first has boxes. The first call takes
    seconds. `formats` are those of the weights on disk; in memory they have `quantization`, else
    `dtype`, and `weight_bytes`. `settings` are those that differ from their defaults; only an admin
    sees them.
    """
    ready = state_for_ui(request).loaded()
    glassbox = glassbox_of(request)
    try:
        structure = await glassbox.structure.read(
            ready.max_model_len, ready.dtype, drafts_by_head=ready.drafts_by_head
        )
    except StructureError as error:
        message = f"The structure of this model could not be found: {error}"
        raise ApiError(503, "structure_unknown", message, headers={"retry-after": "5"}) from None
    variance = BATCH_VARIANCE[ready.batch_variance] if ready.batch_variance else None
    return {
        "architecture": ready.architecture,
        "kind": ready.kind,
        "dtype": ready.dtype,
        "max_model_len": ready.max_model_len,
        "parameters": ready.parameters,
        "weight_bytes": ready.weight_bytes,
        "quantization": ready.quantization,
        "formats": await asyncio.to_thread(glassbox.checkpoint.formats, ready.weight_parts),
        "boxes": [_box(box) for box in structure.boxes],
        "config": structure.config,
        "attention": {name: _attention(facts) for name, facts in structure.attention.items()},
        "wavelengths": structure.wavelengths,
        "memory": [_memory(entry) for entry in ready.memory],
        "settings": glassbox.changed_settings if is_admin(request) else None,
        "uneven": None if variance is None else {"why": variance[0], "cure": variance[1]},
    }


def _box(box: ModelBox) -> dict[str, Any]:
    fields = msgspec.structs.asdict(box)
    return {**fields, "attention": _attention(box.attention) if box.attention else None}


def _attention(facts: AttentionFacts) -> dict[str, Any]:
    return msgspec.structs.asdict(facts)


def _memory(entry: MemoryEntry) -> dict[str, Any]:
    return msgspec.structs.asdict(entry)
