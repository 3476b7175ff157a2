"""ResponsesWriter: events made by hand, streamed and whole, checked with OpenAI's schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.generate import TokenLogprobs
from server.api.responses.ids import new_response_id
from server.api.responses.schemas import ResponsesBody
from server.api.responses.writer import ResponsesWriter
from server.generation.events import (
    ChoiceEvents,
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenWithLogprobs,
    ToolCallDelta,
    Usage,
)
from server.http.errors import ApiError
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.support.openai_spec import OpenAISpec, sse_events
from tests.support.prepared import prepared_request

USAGE = Usage(prompt_tokens=2, completion_tokens=14, cached_tokens=1, reasoning_tokens=5)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
FIELDS: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [TOOL, {"type": "web_search"}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "text": {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    },
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "user": "me",
    "top_p": 0,
    "max_output_tokens": 20,
}
REASONING: list[Event] = [ReasoningDelta("I "), ReasoningDelta("think…")]
TEXT: list[Event] = [TextDelta("Hello ", (), ()), TextDelta("", (), ()), TextDelta("wörld", (), ())]
CALLS: list[Event] = [
    ToolCallDelta(0, "call_a", "get_weather", ""),
    ToolCallDelta(0, None, None, '{"city":'),
    ToolCallDelta(0, None, None, '"Paris"}'),
    ToolCallDelta(1, "call_b", "get_weather", '{"city":"Rome"}'),
]
ANSWERS: dict[str, tuple[list[Event], FinishReason]] = {
    "empty": ([], "stop"),
    "text": (TEXT, "stop"),
    "cut text": (TEXT, "length"),
    "reasoning and text": (REASONING + TEXT, "stop"),
    "cut reasoning": (REASONING, "length"),
    "calls": (CALLS, "tool_calls"),
    "cut call": (CALLS[:2], "length"),
    "all": (REASONING + TEXT + CALLS, "tool_calls"),
    "text after calls": (CALLS + TEXT, "tool_calls"),
}


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., ResponsesWriter]:
    """A function that makes a writer of a request with these fields."""

    def writer(
        response_id: str = "", keep: Callable[[bytes], None] | None = None, **fields: Any
    ) -> ResponsesWriter:
        body = ResponsesBody.model_validate({"input": "Hi", **fields})
        prepared = prepared_request([64, 65], logprobs=None)
        return ResponsesWriter(tokenizer, prepared, body, response_id or new_response_id(), keep)

    return writer


def updates(events: Sequence[Event], reason: FinishReason, seed: int) -> list[ChoiceEvents]:
    """Return the events of an answer in updates of random lengths."""
    rng = random.Random(seed)
    found: list[list[Event]] = [[]]
    for event in [*events, Finish(reason)]:
        if rng.random() < 0.5:
            found.append([])
        found[-1].append(event)
    return [ChoiceEvents(0, part) for part in found]


def streamed(writer: ResponsesWriter, parts: Sequence[ChoiceEvents]) -> list[dict[str, Any]]:
    stream = writer.opening() + b"".join(map(writer.chunks, parts)) + writer.closing(USAGE)
    return sse_events(stream.decode())


def accumulated(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that a client builds from the deltas of a stream."""
    output: list[dict[str, Any]] = []
    for event in events:
        place = event.get("output_index", -1)
        match event["type"]:
            case "response.output_item.added":
                assert place == len(output)
                output.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                assert event["content_index"] == len(output[place]["content"])
                output[place]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = output[place]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "response.function_call_arguments.delta":
                output[place]["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert output[place]["content"][0]["text"] == event["text"]
            case "response.function_call_arguments.done":
                assert output[place]["arguments"] == event["arguments"]
                assert output[place]["name"] == event["name"]
            case "response.output_item.done":
                output[place]["status"] = event["item"]["status"]
                assert output[place] == event["item"]
        if "item_id" in event:
            assert event["item_id"] == output[place]["id"]
    return output


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("fields", [{}, FIELDS], ids=["plain", "fields"])
def test_stream_equals_whole_answer_and_fits_openai_schemas(
    make: Callable[..., ResponsesWriter], spec: OpenAISpec, name: str, fields: dict[str, Any]
) -> None:
    events, reason = ANSWERS[name]
    response_id = new_response_id()
    [one] = [ChoiceEvents(0, [*events, Finish(reason)])]
    whole = json.loads(make(response_id, **fields).whole([one], USAGE))
    spec.check("Response", whole)
    for seed in range(5):
        found = streamed(make(response_id, **fields), updates(events, reason, seed))
        for event in found if seed == 0 else ():
            spec.check_event(event)
        assert accumulated(found) == whole["output"]
        last = found[-1]["response"]
        assert last | {"created_at": 0, "completed_at": 0} == whole | {
            "created_at": 0,
            "completed_at": 0,
        }


def test_stream_has_openai_events_in_order(make: Callable[..., ResponsesWriter]) -> None:
    events = [*REASONING[:1], *TEXT[:1], *CALLS[:2]]
    found = streamed(make(), updates(events, "tool_calls", 0))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []


def test_whole_parallel_calls_are_one_item_each(make: Callable[..., ResponsesWriter]) -> None:
    events = ChoiceEvents(0, [*CALLS, Finish("tool_calls")])
    first, second = json.loads(make().whole([events], USAGE))["output"]
    assert (first["call_id"], first["arguments"]) == ("call_a", '{"city":"Paris"}')
    assert (second["call_id"], second["arguments"]) == ("call_b", '{"city":"Rome"}')
    assert first["type"] == second["type"] == "function_call"
    assert first["status"] == second["status"] == "completed"
    assert first["id"] != second["id"]


def test_whole_cut_answer_is_incomplete(make: Callable[..., ResponsesWriter]) -> None:
    events = ChoiceEvents(0, [*REASONING, *CALLS[:2], Finish("length")])
    body = json.loads(make().whole([events], USAGE))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


def test_closing_cut_answer_ends_with_incomplete_event(
    make: Callable[..., ResponsesWriter],
) -> None:
    found = streamed(make(), updates(TEXT, "length", 0))
    assert found[-1]["type"] == "response.incomplete"
    assert found[-2]["item"]["status"] == "incomplete"


def test_whole_usage_has_the_names_of_this_api(make: Callable[..., ResponsesWriter]) -> None:
    body = json.loads(make().whole([ChoiceEvents(0, [Finish("stop")])], USAGE))
    assert body["usage"] == {
        "input_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 16,
    }


def test_whole_repeats_the_request(make: Callable[..., ResponsesWriter]) -> None:
    body = json.loads(make(**FIELDS).whole([ChoiceEvents(0, [Finish("stop")])], USAGE))
    for name in ("instructions", "metadata", "user", "top_p", "max_output_tokens"):
        assert body[name] == FIELDS[name]
    assert body["tools"] == [TOOL]  # without the tool that was left out
    assert body["tool_choice"] == FIELDS["tool_choice"]
    assert body["text"]["format"] == FIELDS["text"]["format"]
    assert body["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(500, "internal_error", "It broke."), "server_error"),
        (ApiError(503, "engine_unavailable", "It is gone."), "server_error"),
        (ApiError(400, "invalid_value", "Bad.", param="input"), "invalid_prompt"),
    ],
)
def test_failure_ends_with_error_and_failed_response(
    make: Callable[..., ResponsesWriter], spec: OpenAISpec, error: ApiError, code: str
) -> None:
    kept: list[bytes] = []
    writer = make(keep=kept.append)
    stream = writer.opening() + writer.chunks(ChoiceEvents(0, TEXT)) + writer.failure(error)
    found = sse_events(stream.decode())
    for event in found:
        spec.check_event(event)
    *_, described, last = found
    assert (described["type"], described["code"]) == ("error", error.code)
    assert error.message in described["message"]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    [item] = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello wörld")
    assert not kept


def test_finished_response_is_kept_as_the_client_gets_it(
    make: Callable[..., ResponsesWriter],
) -> None:
    kept: list[bytes] = []
    whole = make(keep=kept.append).whole([ChoiceEvents(0, [*TEXT, Finish("stop")])], USAGE)
    found = streamed(make(keep=kept.append), updates(TEXT, "stop", 0))
    assert kept[0] == whole
    assert json.loads(kept[1]) == found[-1]["response"]
    assert found[-1]["response"]["store"] is True
    assert streamed(make(), updates(TEXT, "stop", 0))[-1]["response"]["store"] is False


def test_logprobs_of_an_unfinished_character_come_with_its_text(
    make: Callable[..., ResponsesWriter], spec: OpenAISpec
) -> None:
    """The first byte of `ö` has no text yet, and no message has begun."""
    tokens = [TokenWithLogprobs(t, TokenLogprobs(-0.5, ((t, -0.5),)), 0) for t in (127, 114)]
    events: list[Event] = [TextDelta("", (), tokens[:1]), TextDelta("ö", (), tokens[1:])]
    writer = make(include=["message.output_text.logprobs"])
    found = streamed(writer, [ChoiceEvents(0, [event]) for event in [*events, Finish("stop")]])
    for event in found:
        spec.check_event(event)
    [delta] = [event for event in found if event["type"] == "response.output_text.delta"]
    assert len(delta["logprobs"]) == 2
    part = found[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == delta["logprobs"]


def test_ping_is_a_comment_once_the_answer_has_begun(make: Callable[..., ResponsesWriter]) -> None:
    writer = make()
    opening = writer.opening()
    again = writer.ping().removeprefix(b": ping\n")
    assert opening.endswith(again)
    assert again.startswith(b"event: response.in_progress\n")
    writer.chunks(ChoiceEvents(0, TEXT))
    assert writer.ping() == b": ping\n\n"
