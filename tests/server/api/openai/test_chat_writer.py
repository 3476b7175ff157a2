"""The first chunks of a streamed chat, and the reasons for which its calls end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>Hm.</think>"
ROLE = "assistant"


def engine_of(script: Any) -> FakeEngine:
    """Return an engine with room for tools: each of their bytes is a token."""
    return FakeEngine(script, info=msgspec.structs.replace(INFO, max_model_len=4096))


async def choices_of(served: Served, **fields: Any) -> list[Any]:
    """Return the choices of all chunks of a stream."""
    response = await served.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize(
    ("text", "fields", "content", "following"),
    [
        ("Hello", {}, "", "content"),
        ("Hello", TOOLS, "", "content"),
        (f"Let me see.\n{CALL}", TOOLS, "", "content"),
        (CALL, TOOLS, None, "tool_calls"),
        (CALL, {**TOOLS, "tool_choice": "required"}, None, "tool_calls"),
        (CALL, {**TOOLS, "tool_choice": "none"}, "", "content"),
        (CALL, {"functions": [WEATHER]}, None, "function_call"),
        (THOUGHT + CALL, TOOLS, None, "reasoning"),
        (THOUGHT + "Hello", {}, "", "reasoning"),
    ],
)
@pytest.mark.parametrize("burst", [1, 400])
async def test_first_chunk_has_the_role_and_null_before_a_call(
    model: Path, says, text: str, fields: Any, content: str | None, following: str, burst: int
) -> None:
    async with serving(engine_of(says(text)), model, reasoning_parser="think") as served:
        served.engine.burst = burst
        first, second, *rest = await choices_of(served, **fields)
        whole = (await served.chat(**fields)).json()["choices"][0]
    assert first["delta"] == {"role": ROLE, "content": content}
    assert (first["finish_reason"], first["logprobs"]) == (None, None)
    assert following in second["delta"]
    assert all("role" not in choice["delta"] for choice in (second, *rest))
    assert rest[-1]["delta"] == {}
    texts = [choice["delta"].get("content") for choice in (first, second, *rest)]
    told = "".join(text for text in texts if text)
    assert told == (whole["message"]["content"] or "")


async def test_first_chunk_of_a_call_agrees_with_recorded_streams(
    model: Path, says, assets: Path
) -> None:
    folder = assets / "openai-spec" / "openai-python-sse"
    (path,) = folder.glob("f82268f*.sse")
    lines = [line for line in path.read_text().splitlines() if line.startswith("data: {")]
    theirs = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:2]]
    async with serving(engine_of(says(CALL)), model) as served:
        mine = (await choices_of(served, **TOOLS))[:2]
    assert [choice.keys() for choice in mine] == [choice.keys() for choice in theirs]
    assert mine[0]["delta"] == theirs[0]["delta"]
    [call], [their_call] = (found[1]["delta"]["tool_calls"] for found in (mine, theirs))
    assert call.keys() == their_call.keys()
    assert call["function"].keys() == their_call["function"].keys()
    assert (call["index"], call["type"]) == (0, "function")


async def test_each_choice_that_may_call_has_one_role(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        choices = await choices_of(served, n=3, return_token_ids=True, **TOOLS)
    for index in range(3):
        mine = [choice["delta"] for choice in choices if choice["index"] == index]
        assert mine[0] == {"role": ROLE, "content": None}
        assert sum("role" in delta for delta in mine) == 1


async def test_empty_answer_that_might_have_called_has_an_empty_text(model: Path, says) -> None:
    async with serving(engine_of(says("")), model) as served:
        first, last = await choices_of(served, **TOOLS)
    assert (first["delta"], last["finish_reason"]) == ({"role": ROLE, "content": ""}, "stop")


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (TOOLS, "tool_calls"),
        ({**TOOLS, "tool_choice": "required"}, "tool_calls"),
        ({**TOOLS, "tool_choice": NAMED}, "stop"),
        ({"functions": [WEATHER]}, "function_call"),
        ({"functions": [WEATHER], "function_call": {"name": "weather"}}, "stop"),
        ({**TOOLS, "tool_choice": NAMED, "max_tokens": 30}, "length"),
    ],
)
async def test_call_ends_as_in_openais_api(model: Path, says, fields: Any, reason: str) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        whole = (await served.chat(**fields)).json()["choices"][0]
        last = (await choices_of(served, **fields))[-1]
    assert whole["finish_reason"] == last["finish_reason"] == reason


async def test_answer_without_reasoning_has_none_whole_or_streamed(model: Path, says) -> None:
    fields = {"include_reasoning": False, "stream_options": {"include_usage": True}}
    text = f"{THOUGHT}Yes."
    async with serving(engine_of(says(text)), model, reasoning_parser="think") as served:
        response = await served.chat(include_reasoning=False)
        (choice,) = response.json()["choices"]
        stream = await served.chat(stream=True, **fields)
        shown = (await served.chat(include_reasoning=True)).json()
    assert "x-ignored-params" not in response.headers
    assert choice["message"] == {"role": ROLE, "content": "Yes.", "refusal": None}
    assert "Hm." not in stream.text
    assert "reasoning" not in stream.text.replace("reasoning_tokens", "")
    details = shown["usage"]["completion_tokens_details"]
    assert details == response.json()["usage"]["completion_tokens_details"]
    assert json.dumps(details, separators=(",", ":")) in stream.text
    assert shown["choices"][0]["message"]["reasoning"] == "Hm."


async def test_call_after_hidden_reasoning_begins_with_null(model: Path, says) -> None:
    async with serving(engine_of(says(THOUGHT + CALL)), model, reasoning_parser="think") as served:
        first, second, *_ = await choices_of(served, include_reasoning=False, **TOOLS)
    assert first["delta"] == {"role": ROLE, "content": None}
    assert "tool_calls" in second["delta"]


BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}]
PARTS = [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({"messages": BEGUN, **CONTINUED}, "It is"),
        ({"messages": BEGUN}, "It is"),
        ({"messages": [BEGUN[0], BEGUN[1] | {"content": PARTS}], **CONTINUED}, "It\nis"),
        ({"messages": BEGUN[:1], **CONTINUED}, "Hi"),
        ({"messages": BEGUN[:1]}, ""),
        ({"messages": BEGUN, "echo": False, **CONTINUED}, ""),
    ],
)
async def test_echo_begins_the_answer_with_the_last_message(
    model: Path, says, fields: Any, echoed: str
) -> None:
    fields = {"echo": True, "n": 2, **fields}
    async with serving(engine_of(says(" sunny.")), model) as served:
        response = await served.chat(**fields)
        choices = await choices_of(served, **fields)
    assert "x-ignored-params" not in response.headers
    for index in range(2):
        mine = [choice["delta"] for choice in choices if choice["index"] == index]
        assert mine[0]["content"] == echoed
        told = "".join(delta.get("content") or "" for delta in mine)
        whole = response.json()["choices"][index]["message"]["content"]
        assert told == whole == f"{echoed} sunny."


async def test_echo_before_a_call_is_its_content(model: Path, says) -> None:
    fields = {"messages": BEGUN, "echo": True, **TOOLS}
    async with serving(engine_of(says(CALL)), model) as served:
        first, *_ = await choices_of(served, **fields)
        (choice,) = (await served.chat(**fields)).json()["choices"]
    assert first["delta"]["content"] == choice["message"]["content"] == "It is"
    assert choice["finish_reason"] == "tool_calls"


async def test_logprobs_of_the_whole_vocabulary_are_refused_with_the_limit(served: Served) -> None:
    for path, fields in {
        "/v1/chat/completions": {"messages": BEGUN[:1], "logprobs": True},
        "/v1/responses": {"input": "Hi"},
    }.items():
        response = await served.http.post(path, json={**fields, "top_logprobs": -1})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "top_logprobs")
        assert error["message"] == (
            "top_logprobs: -1, the whole vocabulary, is not supported: at most 20."
        )


async def test_echo_of_many_long_choices_is_refused(model: Path, says) -> None:
    long = [BEGUN[0], BEGUN[1] | {"content": "a" * 500}]
    async with serving(engine_of(says("x")), model, max_body_bytes=2000) as served:
        assert (await served.chat(messages=long, echo=True, n=4)).status_code == 200
        error = (await served.chat(messages=long, echo=True, n=5)).json()["error"]
    assert error["param"] == "echo"
