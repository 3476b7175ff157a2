"""Custom tools of the chat API: their calls, whole and streamed, and their place in histories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.openai_spec import OpenAISpec, chunks_of
from tests.support.rig import serving

REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"\d+ \"x\"\n?"}}
COUNT: dict[str, Any] = {"type": "custom", "custom": {"name": "count", "format": REGEX}}
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Run code."}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
HELD = '<tool_call>\n{"name": "count", "arguments":\n12 "x"\n'


def engine_of(script: Any) -> FakeEngine:
    engine = FakeEngine(script)
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096)
    return engine


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (HELD, "count", '12 "x"\n'),
        (call_text("run", {"input": "print('é')\n"}), "run", "print('é')\n"),
    ],
)
async def test_custom_call_has_its_input_whole_and_streamed(
    model: Path, says, spec: OpenAISpec, text: str, name: str, expected: str
) -> None:
    async with serving(engine_of(says(text)), model) as served:
        whole = (await served.chat(tools=[COUNT, RUN, ADD])).json()
        stream = await served.chat(tools=[COUNT, RUN, ADD], stream=True)
    spec.check("CreateChatCompletionResponse", whole)
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["id"]
    assert (call["type"], call["custom"]) == ("custom", {"name": name, "input": expected})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(stream.text)]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert (parts[0]["type"], parts[0]["custom"]["name"]) == ("custom", name)
    assert parts[0]["id"]
    assert all(part["index"] == 0 and "function" not in part for part in parts)
    assert "".join(part["custom"]["input"] for part in parts) == expected


async def test_cut_custom_call_ends_with_length(model: Path, says) -> None:
    async with serving(engine_of(says(HELD)), model) as served:
        answer = await served.chat(tools=[COUNT], max_tokens=len(HELD) - 3)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["custom"]["input"] == '12 "'


async def test_custom_calls_of_a_history_reach_the_template(model: Path, says) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": 'a "b"\n'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    async with serving(engine_of(says("Hello")), model) as served:
        response = await served.chat(messages=messages, tools=[RUN, COUNT], tool_choice="auto")
        assert response.status_code == 200, response.text
        (request,) = served.engine.requests
        prompt = served.app.state.penstock.tokenizer.decode(request.prompt)
    assert '{"name": "run", "arguments": {"input": "a \\"b\\"\\n"}}' in prompt
    assert json.dumps(REGEX["grammar"]["definition"])[1:-1] in prompt
    assert request.params.grammar is not None


@pytest.mark.parametrize("named", [{"name": "count"}, None])
async def test_custom_tools_can_be_named_and_allowed(model: Path, says, named) -> None:
    choice: dict[str, Any] = {"type": "custom", "custom": named}
    if named is None:
        entries = [{"type": "custom", "custom": {"name": "count"}}]
        allowed = {"mode": "required", "tools": entries}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with serving(engine_of(says(HELD)), model) as served:
        response = await served.chat(tools=[COUNT, RUN], tool_choice=choice)
        assert response.json()["choices"][0]["message"]["tool_calls"][0]["type"] == "custom"
        grammar = served.engine.requests[-1].params.grammar
        assert grammar is not None
        assert "%lark" in grammar.source
        assert "run" not in grammar.source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]},
            "tools.0.custom.format",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages.0.tool_calls.0.custom",
        ),
        ({"tools": [RUN], "tool_choice": COUNT}, "tool_choice"),
    ],
)
async def test_wrong_custom_tool_is_refused_by_name(model: Path, says, fields, param) -> None:
    async with serving(engine_of(says("x")), model) as served:
        response = await served.chat(**fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
