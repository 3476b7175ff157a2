"""Answers of the demo model against OpenAI's schemas: real tokens, calls and logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server.conftest import spec
from tests.support.openai_spec import OpenAISpec, chunks_of
from tests.support.serve import Server

__all__ = ["spec"]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather in a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "What is the weather in Rome and in Paris?"}]
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 5, "logit_bias": {"5": -100}},
    "tools": {"tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required", "logprobs": True},
    "functions": {"functions": [WEATHER], "function_call": {"name": "get_weather"}},
    "json": {"response_format": FORMAT},
    "reasoning": {"reasoning_effort": "high", "seed": 1},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"n": 2},
    "echo": {"echo": True, "logprobs": 5},
    "candidates": {"best_of": 2},
}


@pytest.fixture(scope="module")
def http(demo: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=demo.base_url, timeout=60) as http:
        yield http


def post(http: httpx2.Client, path: str, **fields: Any) -> httpx2.Response:
    response = http.post(path, json={"max_tokens": 60, **fields})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_chat_of_demo_model_has_the_schema(
    http: httpx2.Client, spec: OpenAISpec, fields: dict[str, Any]
) -> None:
    path, body = "/v1/chat/completions", {"messages": MESSAGES, **fields}
    whole = post(http, path, **body).json()
    spec.check("CreateChatCompletionResponse", whole)
    options = {"include_usage": True}
    chunks = chunks_of(post(http, path, **body, stream=True, stream_options=options).text)
    for chunk in chunks:
        spec.check("CreateChatCompletionStreamResponse", chunk)
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_required_call_of_demo_model_fits_its_parameters(http: httpx2.Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    body |= {"parallel_tool_calls": False}
    (choice,) = post(http, "/v1/chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] == "get_weather"
        assert isinstance(json.loads(call["function"]["arguments"])["city"], str)


@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completion_of_demo_model_has_the_schema(
    http: httpx2.Client, spec: OpenAISpec, fields: dict[str, Any]
) -> None:
    body = {"prompt": "Once upon a time", **fields}
    spec.check_completion(post(http, "/v1/completions", **body).json())
    if "best_of" not in fields:
        stream = post(http, "/v1/completions", **body, stream=True)
        spec.check_completion_chunks(chunks_of(stream.text))
