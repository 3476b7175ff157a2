"""Anthropic's messages: a stream, joined as its clients join it, is the whole answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from server.api.anthropic.answer_blocks import joined_blocks
from server.api.anthropic.writer import MessagesWriter
from server.generation.events import (
    ChoiceEvents,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from server.http.errors import ApiError
from tests.support.prepared import prepared_request

USAGE = Usage(prompt_tokens=50, completion_tokens=7, cached_tokens=32)
EVENTS: list[Event] = [
    ReasoningDelta("Hm."),
    TextDelta("Hello", (), ()),
    ToolCallDelta(0, "call_1", "weather", '{"city":'),
    ToolCallDelta(0, None, None, '"Paris"}'),
    Finish("tool_calls"),
]


def named_events(stream: bytes) -> list[tuple[str, Any]]:
    """Return the name and the data of each event of a stream."""
    found = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append((body["type"], body))
    return found


def client_message(events: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the message that Anthropic's client makes of a stream."""
    assert events[0][0] == "message_start"
    assert events[-1][0] == "message_stop"
    message: dict[str, Any] = events[0][1]["message"]
    assert message["content"] == []
    message["content"] = joined_blocks(body for name, body in events if "block" in name)
    [delta] = [body for name, body in events if name == "message_delta"]
    message["usage"] = delta["usage"]
    return message | delta["delta"]


def streamed(writer: MessagesWriter, events: Sequence[Event]) -> list[tuple[str, Any]]:
    stream = writer.opening()
    for event in events:
        stream += writer.chunks(ChoiceEvents(0, [event]))
    return named_events(stream + writer.closing(USAGE))


def test_joined_stream_is_the_whole_answer() -> None:
    prepared = prepared_request([1] * 50)
    message = client_message(streamed(MessagesWriter(prepared), EVENTS))
    whole = json.loads(MessagesWriter(prepared).whole([ChoiceEvents(0, EVENTS)], USAGE))
    assert message.pop("id").startswith("msg_")
    assert whole.pop("id").startswith("msg_")
    assert message == whole
    assert list(whole) == [
        "type",
        "role",
        "model",
        "content",
        "stop_reason",
        "stop_sequence",
        "stop_details",
        "container",
        "usage",
    ]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]


def test_message_start_has_the_prompt_and_no_ending() -> None:
    events = streamed(MessagesWriter(prepared_request([1] * 50)), [])
    message = events[0][1]["message"]
    assert message["usage"]["input_tokens"] == 50
    assert message["usage"]["output_tokens"] == 0
    assert message["stop_reason"] is message["stop_sequence"] is None
    assert events[1][0] == "ping"


def test_input_tokens_are_those_not_in_the_cache() -> None:
    usage = streamed(MessagesWriter(prepared_request([1])), EVENTS)[-2][1]["usage"]
    assert usage["input_tokens"] == 18
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["cache_read_input_tokens"] == 32
    assert usage["output_tokens"] == 7


def test_reasoning_tokens_are_a_part_of_the_output() -> None:
    writer = MessagesWriter(prepared_request([1]))
    usage = Usage(prompt_tokens=1, completion_tokens=7, cached_tokens=0, reasoning_tokens=3)
    whole = json.loads(writer.whole([ChoiceEvents(0, EVENTS)], usage))
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop"), "end_turn", None),
        (Finish("stop", "END"), "stop_sequence", "END"),
        (Finish("length"), "max_tokens", None),
        (Finish("tool_calls"), "tool_use", None),
        (Finish("tool_calls", "END"), "tool_use", None),
    ],
)
def test_finish_becomes_stop_reason(finish: Finish, reason: str, sequence: str | None) -> None:
    events: list[Event] = [TextDelta("Hi", (), ()), finish]
    message = client_message(streamed(MessagesWriter(prepared_request([1])), events))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_answer_that_fills_the_context_says_so() -> None:
    events: list[Event] = [TextDelta("Hi", (), ()), Finish("length")]
    prepared = dataclasses.replace(prepared_request([1]), adjusted={"max_tokens": 7})
    message = client_message(streamed(MessagesWriter(prepared), events))
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["stop_details"] is None


def test_failure_is_an_error_event() -> None:
    writer = MessagesWriter(prepared_request([1]))
    [(name, body)] = named_events(writer.failure(ApiError(503, "engine_unavailable", "Gone.")))
    assert name == "error"
    assert body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "Gone."},
        "request_id": "req_1",
    }
