"""GET /v1/models: the served model, once for each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.adapters import ServedAdapter
from server.generation.chat_prompt import has_own_tools
from server.http.openapi import Task
from server.state import AppState, state_of
from server.text.generation_config import client_sampling

router = APIRouter()
OTHER_CAPABILITIES: dict[Task, list[str]] = {
    "embed": ["embedding"],
    "score": ["rerank", "classification"],
    "classify": ["classification"],
}


def model_facts(state: AppState, name: str) -> dict[str, Any]:
    """Return the model under one of its names.

    OpenAI's fields come first, then vLLM's, then those that routers and user interfaces read.
    `meta` is llama.cpp's. `client_sampling` is what Penstock's pages and `penstock chat` send where
    the checkpoint gives no value. The API's own defaults are OpenAI's.
    """
    info = state.loaded()
    given = state.tokenizer.defaults
    facts = {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "penstock",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.max_length(),
        "kind": info.kind,
        "task": state.task,
        "tasks": state.tasks,
        "capabilities": _capabilities(state),
        "architecture": info.architecture,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "speculative_model": info.speculative_model,
        "device": info.device,
        "tensor_parallel_size": info.tensor_parallel_size,
        "client_sampling": client_sampling(given) if state.task == "generate" else {},
        "meta": {
            "n_vocab": info.vocab_size,
            "n_ctx": state.max_length(),
            "n_params": info.parameters,
            "size": info.weight_bytes,
        },
    }
    if size := state.vector_size():
        facts["embedding_size"] = size
    return facts


def _capabilities(state: AppState) -> list[str]:
    """Return what the model can do, in Ollama's words.

    Tools that only the system message shows are left out: few such models can call them.
    """
    if state.task != "generate":
        return OTHER_CAPABILITIES[state.task]
    found = ["completion"]
    if state.template is not None:
        found.append("chat")
    if has_own_tools(state):
        found.append("tools")
    if state.image_token is not None:
        found.append("vision")
    if state.answers is not None and state.answers.reasoning_name is not None:
        found.append("thinking")
    return found


def adapter_facts(state: AppState, adapter: ServedAdapter) -> dict[str, Any]:
    """Return an adapter as a model whose parent is the base model, as vLLM lists it."""
    base = state.names[0]
    own = {"created": adapter.created, "root": adapter.path, "parent": base}
    return model_facts(state, adapter.name) | own


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> dict[str, Any]:
    """List the served model under each of its names, and its LoRA adapters."""
    state = state_of(request)
    served = [model_facts(state, name) for name in state.names]
    served += [adapter_facts(state, adapter) for adapter in state.adapters]
    return {"object": "list", "data": served}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Return the served model by one of its names, or one of its LoRA adapters."""
    state = state_of(request)
    adapter = state.adapters.find(name)
    if adapter is not None:
        return adapter_facts(state, adapter)
    return model_facts(state, state.model_name(name))
