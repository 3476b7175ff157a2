"""The demo model's abilities over HTTP: tools, results, thoughts and JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from engine.offline.demo_training.evaluate import Probe, judge, read_probes, request_fields, written
from tests.support.serve import Server

ABILITIES = (
    *("new_tool", "two_calls", "two_results", "thought", "schema"),
    *("result_text", "result_json", "result_list", "result_number", "result_error"),
)
# Results of a weather tool as agents send them, and what the answer quotes.
RESULTS = {
    "Rain, 7 degrees in Oslo": ("7 degrees",),
    '{"result": "Rain, 7 degrees in Oslo"}': ("7 degrees",),
    '{"city": "Oslo", "temperature": 7, "condition": "rainy"}': ("7", "rainy"),
    '["rain", "7 degrees"]': ("rain", "7 degrees"),
    "7": ("7",),
    "Error: city not found": ("city not found",),
}


@pytest.fixture
def sdk(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="-", max_retries=0) as client:
        yield client


def answer(sdk: openai.OpenAI, probe: Probe, **fields: Any) -> dict[str, Any]:
    reply = sdk.chat.completions.create(
        model="demo", temperature=0, max_tokens=150, **request_fields(probe), **fields
    )
    message: dict[str, Any] = reply.choices[0].message.model_dump()
    return message


def streamed(sdk: openai.OpenAI, probe: Probe) -> dict[str, Any]:
    """Return the message that the parts of a stream make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    stream = sdk.chat.completions.create(
        model="demo", temperature=0, max_tokens=150, stream=True, **request_fields(probe)
    )
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump()
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            if call["function"]["name"]:
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            function = message["tool_calls"][call["index"]]["function"]
            function["name"] += call["function"]["name"] or ""
            function["arguments"] += call["function"]["arguments"] or ""
    return message


@pytest.mark.parametrize("topic", ABILITIES)
def test_demo_answers_two_in_five_probes_of_an_ability(sdk: openai.OpenAI, topic: str) -> None:
    probes = [probe for probe in read_probes() if probe["topic"] == topic]
    answers = [answer(sdk, probe) for probe in probes]
    right = [judge(p, written(message)) for p, message in zip(probes, answers, strict=True)]
    assert sum(right) >= 0.4 * len(probes), answers
    for probe, message in zip(probes, answers, strict=True):
        assert bool(message.get("reasoning_content")) == ("effort" in probe)
        if "schema" in probe:
            jsonschema.validate(json.loads(message["content"]), probe["schema"])


@pytest.mark.slow
def test_demo_streamed_calls_and_thoughts_equal_the_whole_answer(sdk: openai.OpenAI) -> None:
    for probe in read_probes():
        if probe["topic"] in ("two_calls", "thought"):
            assert written(streamed(sdk, probe)) == written(answer(sdk, probe))


def test_demo_round_of_two_calls_ends_with_both_results(sdk: openai.OpenAI) -> None:
    (probe, *_) = [probe for probe in read_probes() if probe["topic"] == "two_calls"]
    called = answer(sdk, probe)
    messages = [*probe["messages"], {k: called[k] for k in ("role", "content", "tool_calls")}]
    for call, degrees in zip(called["tool_calls"], (17, 4), strict=True):
        result = json.dumps({"temperature": degrees, "condition": "windy"})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    text = answer(sdk, {**probe, "messages": messages})["content"]
    assert "17" in text
    assert "4" in text


def test_demo_required_tool_choice_calls_a_tool(sdk: openai.OpenAI) -> None:
    (probe, *_) = [probe for probe in read_probes() if probe["topic"] == "new_tool"]
    message = answer(sdk, probe, tool_choice="required")
    assert judge(probe, written(message))


def weather_loop(sdk: openai.OpenAI, system: str, result: str) -> list[Any]:
    """Run a tool loop as agents do, for at most four rounds. Returns the model's messages."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather", "parameters": city}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    said = []
    for _ in range(4):
        reply = sdk.chat.completions.create(
            model="demo",
            messages=messages,
            tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
            temperature=0,
        )
        message = reply.choices[0].message
        said.append(message)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said


@pytest.mark.parametrize("system", ["", "You are a helpful assistant."])
@pytest.mark.parametrize("result", RESULTS)
def test_demo_tool_loop_ends_with_an_answer_that_quotes_the_result(
    sdk: openai.OpenAI, result: str, system: str
) -> None:
    called, reported = weather_loop(sdk, system, result)
    (call,) = called.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert not reported.tool_calls
    for phrase in RESULTS[result]:
        assert phrase in reported.content


def test_demo_answers_behind_a_prompt_of_six_thousand_tokens(sdk: openai.OpenAI) -> None:
    probes = [probe for probe in read_probes() if probe["topic"] == "behind_6k"]
    right = [judge(probe, written(answer(sdk, probe))) for probe in probes]
    assert sum(right) >= 0.4 * len(probes)


def test_demo_context_is_16384_tokens(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert model.model_dump()["max_model_len"] == 16384
