"""Content blocks of an answer: what a stream shows, and what a client makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.anthropic.answer_blocks import (
    SIGNATURE,
    ContentStream,
    joined_blocks,
    parsed_input,
    thoughts_in,
)
from server.generation.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from server.text import exact_json
from tests.support.thorough import examples


def text(value: str) -> TextDelta:
    return TextDelta(value, (), ())


ANSWER: list[Event] = [
    text(""),
    ReasoningDelta("Let me "),
    ReasoningDelta("look."),
    text("I will "),
    text("look."),
    ToolCallDelta(0, "call_1", "weather", ""),
    ToolCallDelta(0, None, None, '{"city": '),
    ToolCallDelta(0, None, None, '"Paris"}'),
    ToolCallDelta(1, "call_2", "time", "{}"),
    text(""),
    Finish("tool_calls"),
]


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the block of a call."""
    block = {"type": "tool_use", "id": id, "name": name, "input": arguments}
    return block | {"caller": {"type": "direct"}}


def pushed(events: Sequence[Event]) -> list[dict[str, Any]]:
    stream = ContentStream()
    return [found for event in events for found in stream.push(event)]


def shape(stream_events: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [
        (event.get("delta", event)["type"].removeprefix("content_block_"), event["index"])
        for event in stream_events
    ]


def test_stream_has_one_block_per_call_and_no_empty_block() -> None:
    assert shape(pushed(ANSWER)) == [
        ("start", 0),
        ("thinking_delta", 0),
        ("thinking_delta", 0),
        ("signature_delta", 0),
        ("stop", 0),
        ("start", 1),
        ("text_delta", 1),
        ("text_delta", 1),
        ("stop", 1),
        ("start", 2),
        ("input_json_delta", 2),
        ("input_json_delta", 2),
        ("stop", 2),
        ("start", 3),
        ("input_json_delta", 3),
        ("stop", 3),
    ]


def test_joined_blocks_of_stream_are_the_whole_answer() -> None:
    assert joined_blocks(pushed(ANSWER)) == [
        {"type": "thinking", "thinking": "Let me look.", "signature": SIGNATURE},
        {"type": "text", "text": "I will look."},
        call("call_1", "weather", {"city": "Paris"}),
        call("call_2", "time", {}),
    ]


def test_answer_without_text_has_no_block() -> None:
    assert pushed([text(""), Finish("stop")]) == []


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """Return the events of an answer: texts, reasoning and calls in any order."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call", "arguments"]))):
        if kind == "text":
            events.append(text(draw(st.sampled_from(["", "a", "bc"]))))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(st.sampled_from(["", "t", "uv"]))))
        elif kind == "call":
            events.append(ToolCallDelta(calls, f"call_{calls}", "f", ""))
            calls += 1
        elif calls and isinstance(events[-1], ToolCallDelta):
            events.append(ToolCallDelta(calls - 1, None, None, draw(st.sampled_from(["{", "1"]))))
    return [*events, Finish("stop")]


@settings(max_examples=examples(500), deadline=None)
@given(events=answers())
def test_every_delta_is_inside_an_open_block_of_its_kind(events: list[Event]) -> None:
    kinds = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "signature_delta": "thinking",
        "input_json_delta": "tool_use",
    }
    opened: str | None = None
    count = 0
    for event in pushed(events):
        match event["type"]:
            case "content_block_start":
                assert opened is None
                assert event["index"] == count
                opened = event["content_block"]["type"]
            case "content_block_delta":
                assert event["index"] == count
                assert kinds[event["delta"]["type"]] == opened
            case "content_block_stop":
                assert event["index"] == count
                assert opened is not None
                opened = None
                count += 1
    assert opened is None


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("{}", {}),
        ("", {}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": 1, "b": "un', {"a": 1}),
        ('{"a"', {}),
        ("[1]", {}),
        ("nonsense", {}),
        ('{"a": 123456789012345678901234567890, "b": "', {"a": 123456789012345678901234567890}),
        ('{"a": 1e999, "b": "', {}),
        ('{"a": ' + "9" * 5000, {}),
        ('{"a": ' + "[" * 5000, {}),
    ],
)
def test_parsed_input_of_cut_arguments_has_the_complete_members(
    arguments: str, found: dict[str, Any]
) -> None:
    parsed = parsed_input(arguments)
    assert parsed == found
    exact_json.dumps(parsed)


def test_omitted_thoughts_are_in_the_signature_alone() -> None:
    events = [ReasoningDelta("Hm, "), ReasoningDelta("é."), text("Yes."), Finish("stop")]
    stream = ContentStream(omits_thoughts=True)
    sent = [each for event in events for each in stream.push(event)]
    assert [each["delta"]["type"] for each in sent if "delta" in each] == [
        "signature_delta",
        "text_delta",
    ]
    thinking, answer = joined_blocks(sent)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "")
    assert thoughts_in(thinking["signature"]) == "Hm, é."
    assert answer == {"type": "text", "text": "Yes."}


@pytest.mark.parametrize("signature", ["", SIGNATURE, "EqQBCgIYAh", "thoughts-?", "thoughts-/w=="])
def test_signature_of_another_server_holds_no_thoughts(signature: str) -> None:
    assert thoughts_in(signature) == ""
