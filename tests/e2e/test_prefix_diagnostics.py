"""The lost tokens in an answer are those that the engine's cache then does not find."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.support.serve import Server

WORDS = ["river", "mill", "boat", "stone", "bridge", "water", "hill", "tower", "lamp", "old"]
Json = dict[str, Any]


@pytest.fixture
def http(demo: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=demo.base_url, timeout=120) as http:
        yield http


def text(count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def conversation() -> Json:
    tools = [
        {"type": "function", "name": f"{word}_{text(1)}", "description": text(6), "parameters": {}}
        for word in ("first", "second")
    ]
    said = [{"role": role, "content": text(40)} for role in ("user", "assistant", "user")]
    return {"instructions": text(60), "tools": tools, "input": said}


def turn_tools_round(body: Json) -> str:
    body["tools"].reverse()
    return "tools"


def add_space(body: Json) -> str:
    body["instructions"] = body["instructions"].replace(" ", "  ", 1)
    return "system"


def change_message(body: Json) -> str:
    body["input"][1]["content"] += " z"
    return "input.1"


@pytest.mark.parametrize("edit", [turn_tools_round, add_space, change_message])
def test_lost_tokens_are_those_that_the_cache_does_not_find(
    http: httpx2.Client, edit: Callable[[Json], str]
) -> None:
    size = http.post("/ui/api/prompt", json={"prompt": "a"}, headers={"x-penstock-ui": "1"}).json()[
        "block_size"
    ]
    body = conversation()
    options: Json = {"prewarm": True}
    first = http.post("/v1/responses", json=body | {"prompt_cache_options": options}).json()
    assert (first["status"], first["output"]) == ("completed", [])
    options = {"comparison_response_id": first["id"], "prewarm": True}
    again = http.post("/v1/responses", json=body | {"prompt_cache_options": options}).json()
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    changed = copy.deepcopy(body)
    planted = edit(changed)
    second = http.post("/v1/responses", json=changed | {"prompt_cache_options": options}).json()
    found = second["prompt_cache_diagnostics"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"] // size * size
    whole = again["usage"]["input_tokens_details"]["cached_tokens"] // size * size
    assert found["held"] == planted
    assert found["comparison_reusable_tokens"] == cached
    assert found["cache_missed_tokens"] == whole - cached > 0


def test_count_of_input_tokens_is_that_of_the_response(http: httpx2.Client) -> None:
    body = conversation()
    counted = http.post("/v1/responses/input_tokens", json=body).json()
    answer = http.post("/v1/responses", json=body | {"max_output_tokens": 1}).json()
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": answer["usage"]["input_tokens"],
    }
    more = {"previous_response_id": answer["id"], "input": "Go on."}
    counted = http.post("/v1/responses/input_tokens", json=more).json()
    answer = http.post("/v1/responses", json=more | {"max_output_tokens": 1}).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
