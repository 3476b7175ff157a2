"""Tools of /v1/messages: why an answer with calls ends, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.api.anthropic.test_writer import client_message, named_events
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f"{CALL}\n{CALL}"
NAMED = {"type": "tool", "name": "weather"}


def engine_of(script: Any) -> FakeEngine:
    """Return an engine with room for tools: each of their bytes is a token."""
    return FakeEngine(script, info=msgspec.structs.replace(INFO, max_model_len=4096))


async def both(served: Served, **fields: Any) -> dict[str, Any]:
    """Return the answer of a request with the tool, which is the same whole and streamed."""
    fields = {"tools": [WEATHER], "max_tokens": 400, **fields}
    whole = (await served.message(**fields)).json()
    streamed = client_message(named_events((await served.message(stream=True, **fields)).content))
    for message in (whole, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("id", None)
    assert whole == streamed
    return whole


@pytest.mark.parametrize(
    "choice",
    [None, {"type": "auto"}, {"type": "any"}, NAMED, NAMED | {"disable_parallel_tool_use": True}],
)
@pytest.mark.parametrize("text", [CALL, f"Let me see.\n{CALL}", TWO])
async def test_answer_with_calls_ends_with_tool_use_however_it_was_chosen(
    model: Path, says, choice: Any, text: str
) -> None:
    fields = {} if choice is None else {"tool_choice": choice}
    async with serving(engine_of(says(text)), model) as served:
        message = await both(served, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    is_single = choice is not None and choice["type"] == "tool"
    assert len(calls) == (1 if is_single else text.count(CALL))
    assert all(call["input"] == {"city": "Rome"} for call in calls)


async def test_answer_with_thoughts_and_a_named_call_ends_with_tool_use(model: Path, says) -> None:
    text = f"<think>Hm.</think>{CALL}"
    async with serving(engine_of(says(text)), model, reasoning_parser="think") as served:
        message = await both(served, tool_choice=NAMED)
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, NAMED])
async def test_call_that_is_cut_ends_with_max_tokens(model: Path, says, choice: Any) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        message = await both(served, tool_choice=choice, max_tokens=len(CALL) - 20)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["type"] == "tool_use"


async def test_stop_sequence_inside_a_call_is_the_stop_reason(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        message = await both(served, tool_choice=NAMED, stop_sequences=["Rome"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Rome")


async def test_answer_without_a_call_ends_the_turn(model: Path, says) -> None:
    async with serving(engine_of(says("It rains.")), model) as served:
        message = await both(served, tool_choice={"type": "auto"})
    assert message["stop_reason"] == "end_turn"
    assert message["content"] == [{"type": "text", "text": "It rains."}]
