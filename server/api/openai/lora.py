"""Load and unload LoRA adapters while the server runs: /v1/load_lora_adapter as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.api.openai.models import adapter_facts
from server.api.openai.schemas.adapter import LoadAdapterBody, UnloadAdapterBody
from server.http.addresses import is_loopback
from server.http.api_keys import keys_of
from server.http.auth import is_admin
from server.http.body import ignored_header, read_body
from server.http.errors import ApiError
from server.http.openapi import body_schema
from server.state import AppState, state_of

router = APIRouter()


def _state_for_admin(request: Request) -> AppState:
    """Return the state for a request that changes what all clients see.

    Raises a 403 ApiError without admin rights, which a server without keys gives only to clients
    that reach its loopback address without a proxy, and a 404 if the server takes no adapters.
    Raises EngineUnavailableError.
    """
    state = state_of(request)
    if keys_of(request.app) and not is_admin(request):
        message = "Loading and unloading adapters needs a key of --admin-key-file."
        raise ApiError(403, "admin_key_required", message)
    if not is_admin(request) or not is_loopback(state.config.host):
        message = (
            "A server without keys loads adapters only if it listens on a loopback address, and "
            "not for requests that a proxy forwards; start it with --admin-key-file."
        )
        raise ApiError(403, "admin_key_required", message)
    if not state.loaded().max_loras:
        message = "This server takes no adapters; start it with --max-loras or --lora-modules."
        raise ApiError(404, "not_found", message)
    return state


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadAdapterBody))
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder; return it as /v1/models lists it. Needs an admin key."""
    state = _state_for_admin(request)
    body = await read_body(request, LoadAdapterBody, state.body_turn)
    state.model_name(body.model)
    adapter = await state.adapters.load(state.client, body.lora_name, body.lora_path)
    return JSONResponse(adapter_facts(state, adapter), headers=ignored_header(body.ignored))


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapterBody))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. Requests that use it end as usual. Needs an admin key."""
    state = _state_for_admin(request)
    body = await read_body(request, UnloadAdapterBody, state.body_turn)
    state.model_name(body.model)
    state.adapters.unload(state.client, body.lora_name)
    answer = {"id": body.lora_name, "object": "model", "deleted": True}
    return JSONResponse(answer, headers=ignored_header(body.ignored))
