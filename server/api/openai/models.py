"""GET /v1/models: the served model, once for each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.state import AppState, state_of

router = APIRouter()


def _model(state: AppState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "penstock",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.max_length(),
        "kind": state.loaded().kind,
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the served model under each of its names."""
    state = state_of(request)
    return {"object": "list", "data": [_model(state, name) for name in state.names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Return the served model by one of its names."""
    state = state_of(request)
    return _model(state, state.model_name(name))
