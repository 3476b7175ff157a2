"""GET /v1/models: the served model, once for each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.state import AppState, state_of

router = APIRouter()


def _model(service: AppState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "penstock",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.max_length(),
        "kind": service.loaded().kind,
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the served model under each of its names."""
    service = state_of(request)
    return {"object": "list", "data": [_model(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Return the served model by one of its names."""
    service = state_of(request)
    return _model(service, service.model_name(name))
