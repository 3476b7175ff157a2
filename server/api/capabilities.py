"""GET /capabilities: what this server and its model can do, read from the code that does it."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.openai.models import model_facts
from server.fingerprint import fingerprint_of, fingerprint_settings
from server.generation.chat_prompt import has_own_tools
from server.generation.limits import MAX_CHOICES, MAX_PROMPT_LOGPROBS
from server.http.compression import json_response
from server.http.operations import Operation, operations, without_null
from server.http.query import Query, query_schema, read_query
from server.state import VERSION, AppState, state_of
from server.text.wanted_grammar import GrammarKind

router = APIRouter()


class CapabilitiesQuery(Query):
    path: Annotated[str | None, Field(description="Only the routes of this path.")] = None


@router.get("/capabilities", openapi_extra=query_schema(CapabilitiesQuery))
async def capabilities(request: Request) -> Response:
    """Return the model, the limits, and every route with its parameters and their ranges.

    A parameter is a JSON Schema; `default` includes the settings of the checkpoint.
    """
    query, headers = read_query(request, CapabilitiesQuery)
    state = state_of(request)
    settings = fingerprint_settings(VERSION, state.loaded())
    facts = {
        "object": "capabilities",
        "version": VERSION,
        "model": model_facts(state, state.names[0]),
        "names": state.names,
        "system_fingerprint": {
            "value": fingerprint_of(settings),
            "settings": settings,
        },
        "batch_invariant": state.loaded().batch_variance is None,
        "limits": _limits(state),
        "structured_output": _structured_output(state),
        "tool_calling": _tool_calling(state),
        "reasoning": _reasoning(state),
        "images": state.image_token is not None,
    }
    found = operations(request.app.openapi())
    routes = [_route(state, each) for each in found if query.path in (None, each.path)]
    return json_response(request, {**facts, "routes": routes}, headers)


def _limits(state: AppState) -> dict[str, int]:
    info = state.loaded()
    return {
        "max_model_len": state.max_length(),
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "max_body_bytes": state.config.max_body_bytes,
        "max_choices": MAX_CHOICES,
        "max_prompt_logprobs": MAX_PROMPT_LOGPROBS,
    }


def _structured_output(state: AppState) -> list[str]:
    """Return the kinds of grammar that an answer can follow; it needs an end token."""
    if state.task != "generate" or not state.tokenizer.eos_token_ids:
        return []
    return ["json_object", *get_args(GrammarKind)]


def _tool_calling(state: AppState) -> dict[str, Any]:
    """Return how the model writes tool calls.

    `shown_by` is where the model reads the tools: in its `template`, or in the `system_message`
    that the server writes for a template without tools. `source` says how the format was found:
    "none" if the template shows none. `round_trips`: its own calls were parsed back.
    """
    own = state.answers
    has_own = has_own_tools(state)
    answers = own if has_own and own and own.calls_name else state.hermes
    if state.task != "generate" or own is None or answers is None or answers.calls_name is None:
        return {"supported": False, "format": None}
    return {
        "supported": True,
        "format": answers.calls_name,
        "source": own.source,
        "round_trips": answers.round_trips,
        "shown_by": "template" if has_own else "system_message",
    }


def _reasoning(state: AppState) -> dict[str, Any]:
    name = None
    if state.task == "generate" and state.answers is not None:
        name = state.answers.reasoning_name
    return {"supported": name is not None, "format": name}


def _route(state: AppState, operation: Operation) -> dict[str, Any]:
    route: dict[str, Any] = {
        "method": operation.method,
        "path": operation.path,
        "description": operation.description,
        "task": operation.task,
        "available": operation.task in (None, *state.tasks),
        "streams": operation.streams,
    }
    if operation.parameters:
        route["required"] = sorted(operation.required)
        route["parameters"] = _parameters(state, operation)
    return route


def _parameters(state: AppState, operation: Operation) -> dict[str, Any]:
    parameters = {}
    for name, schema in operation.parameters.items():
        parameters[name] = dict(without_null(schema))
        if operation.task == "generate" and name in state.tokenizer.defaults:
            parameters[name]["default"] = state.tokenizer.defaults[name]
    return parameters
