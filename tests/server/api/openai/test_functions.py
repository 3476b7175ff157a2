"""`functions` and `function_call` of chats, which OpenAI's API had before tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}


def engine_of(script: Any) -> FakeEngine:
    return FakeEngine(script, info=msgspec.structs.replace(INFO, max_model_len=4096))


async def streamed(served: Served, **fields: Any) -> dict[str, Any]:
    """Return text, call and finish reason of a stream, joined as clients join it."""
    response = await served.chat(stream=True, **fields)
    found: dict[str, Any] = {"content": "", "name": "", "arguments": "", "finish_reason": None}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            delta = choice["delta"]
            assert "tool_calls" not in delta
            found["content"] += delta.get("content", "")
            for name, text in delta.get("function_call", {}).items():
                found[name] += text
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_functions_are_called_once_as_function_call(model: Path, says, choice) -> None:
    fields = {"functions": [WEATHER], "function_call": choice}
    async with serving(engine_of(says(f"Let me see.\n{CALL}\n{CALL}")), model) as served:
        response = await served.chat(**fields)
        stream = await streamed(served, **fields)
    (answer,) = response.json()["choices"]
    assert "x-ignored-params" not in response.headers
    assert answer["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "function_call": CALLED,
        "refusal": None,
    }
    assert answer["finish_reason"] == stream["finish_reason"] == "function_call"
    assert stream["content"] == "Let me see."
    assert {name: stream[name] for name in CALLED} == CALLED


async def test_answer_that_only_calls_has_null_content(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        (answer,) = (await served.chat(functions=[WEATHER])).json()["choices"]
    assert answer["message"]["content"] is None


async def test_named_function_is_held_by_a_grammar_and_ends_with_stop(model: Path, says) -> None:
    fields = {"functions": [WEATHER], "function_call": {"name": "weather"}}
    async with serving(engine_of(says(CALL)), model) as served:
        (answer,) = (await served.chat(**fields)).json()["choices"]
        (request,) = served.engine.requests
    assert request.params.grammar is not None
    assert (answer["message"]["function_call"], answer["finish_reason"]) == (CALLED, "stop")


async def test_function_call_none_hides_the_functions(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        fields = {"functions": [WEATHER], "function_call": "none"}
        (answer,) = (await served.chat(**fields)).json()["choices"]
        (request,) = served.engine.requests
        prompt = served.app.state.penstock.tokenizer.decode(request.prompt)
    assert "weather" not in prompt
    assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")


async def test_empty_functions_and_modes_without_functions_have_no_effect(served: Served) -> None:
    for fields in ({"functions": []}, {"function_call": "auto"}, {"function_call": "none"}):
        response = await served.chat(**fields)
        assert response.json()["choices"][0]["message"]["content"] == "Hello w\u00f6rld!"


async def test_openai_client_reads_a_function_call(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        answer = await served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], functions=[WEATHER]
        )
    call = answer.choices[0].message.function_call
    assert call is not None
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
