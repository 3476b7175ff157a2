"""Long numbers in every API: all digits reach the model and come back, or a 400 names the number.

The bodies are written by hand, because HTTP clients of Python would round the decimals.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.conftest import model, says
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

__all__ = ["model", "says"]

NUMBERS = (
    *("1234567890123456789", "100000000000000000001", "-9223372036854775809"),
    *("0.1000000000000000055", "1E-400", "9007199254740993"),
)
OBJECT = "{" + ", ".join(f'"n{index}": {number}' for index, number in enumerate(NUMBERS)) + "}"
SCHEMA = f'{{"type": "object", "properties": {{"a": {{"default": {OBJECT}}}}}}}'
TEXT = json.dumps(OBJECT)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = '{"role": "user", "content": "Hi"}'


async def post(served: Served, path: str, **fields: str) -> Any:
    """Send a body whose members are written as JSON."""
    given = {"max_tokens": "1000"} if path == MESSAGES else {}
    body = ", ".join(f'"{name}": {value}' for name, value in (given | fields).items())
    headers = {"content-type": "application/json"}
    return await served.http.post(path, content=f"{{{body}}}", headers=headers)


async def prompt_of(served: Served, path: str, **fields: str) -> str:
    response = await post(served, path, **fields)
    assert response.status_code == 200, response.text
    text: str = served.app.state.penstock.tokenizer.decode(served.engine.requests[-1].prompt)
    return text


def has_numbers(response: Any) -> bool:
    """Return whether a body has the object with the numbers, or its text."""
    found = response.text.replace('\\"', '"').replace(" ", "")
    return OBJECT.replace(" ", "") in found


@pytest.fixture
async def roomy(model: Path, says: Any) -> AsyncIterator[Served]:
    """A server with a context for long prompts, whose model calls `f` with the numbers."""
    answer = f'<tool_call>\n{{"name": "f", "arguments": {OBJECT}}}\n</tool_call>'
    engine = FakeEngine(says(answer), info=msgspec.structs.replace(INFO, max_model_len=8192))
    async with serving(engine, model) as served:
        yield served


def function(schema: str, **more: str) -> str:
    """Return a tool of the chat API."""
    strict = "".join(f', "{name}": {value}' for name, value in more.items())
    return f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}{strict}}}}}]'


def fields_of(path: str) -> list[dict[str, str]]:
    """Return requests with the numbers in a call of the history, and in a tool."""
    if path == CHAT:
        call = '{"type": "function", "id": "c", "function": {"name": "f", "arguments": %s}}'
        calls = [call % TEXT, call % OBJECT]
        history = [f'[{USER}, {{"role": "assistant", "tool_calls": [{c}]}}, {USER}]' for c in calls]
        tool = {"messages": f"[{USER}]", "tools": function(SCHEMA)}
        return [*({"messages": messages} for messages in history), tool]
    if path == MESSAGES:
        use = f'{{"type": "tool_use", "id": "c", "name": "f", "input": {OBJECT}}}'
        turn = f'{{"role": "assistant", "content": [{use}]}}'
        tool = f'[{{"name": "f", "input_schema": {SCHEMA}}}]'
        return [{"messages": f"[{USER}, {turn}, {USER}]"}, {"messages": f"[{USER}]", "tools": tool}]
    call = f'{{"type": "function_call", "call_id": "c", "name": "f", "arguments": {TEXT}}}'
    tool = f'[{{"type": "function", "name": "f", "parameters": {SCHEMA}}}]'
    return [{"input": f"[{USER}, {call}, {USER}]"}, {"input": f"[{USER}]", "tools": tool}]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_numbers_of_calls_and_tools_reach_the_prompt_with_all_digits(
    path: str, roomy: Served
) -> None:
    for fields in fields_of(path):
        assert OBJECT in await prompt_of(roomy, path, **fields)


async def test_response_with_numbers_is_stored_echoed_and_continued(roomy: Served) -> None:
    call, tool = fields_of(RESPONSES)
    response = await post(roomy, RESPONSES, **call, tools=tool["tools"])
    assert has_numbers(response), "the answer has the tools of the request"
    stored = await roomy.http.get(f"{RESPONSES}/{response.json()['id']}")
    assert has_numbers(stored)
    previous = json.dumps(response.json()["id"])
    prompt = await prompt_of(roomy, RESPONSES, input='"Go on"', previous_response_id=previous)
    assert OBJECT in prompt


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_numbers_of_an_answer_are_written_with_all_digits(path: str, roomy: Served) -> None:
    fields = fields_of(path)[-1]
    whole = await post(roomy, path, **fields, stream="false")
    assert whole.status_code == 200, whole.text
    assert has_numbers(whole)


HELD = {
    "response_format": '{"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}',
    "structured_outputs": '{"json": %s}',
    "guided_json": "%s",
}


@pytest.mark.parametrize("field", HELD)
@pytest.mark.parametrize("number", NUMBERS)
async def test_schema_with_a_number_that_would_change_is_a_400_that_names_it(
    field: str, number: str, roomy: Served
) -> None:
    for schema in (f'{{"enum": [{number}]}}', f'{{"type": "integer", "minimum": {number}}}'):
        wanted = {field: HELD[field] % schema}
        response = await post(roomy, CHAT, messages=f"[{USER}]", **wanted)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"].startswith(field)
        assert number in error["message"]
    assert not roomy.engine.requests


@pytest.mark.parametrize("choice", ['"required"', '"auto"'])
async def test_forced_or_strict_tool_with_such_a_number_is_a_400_that_names_it(
    choice: str, roomy: Served
) -> None:
    schema = '{"type": "object", "properties": {"id": {"const": 1234567890123456789}}}'
    tools = function(schema, strict="true")
    fields = {"messages": f"[{USER}]", "tool_choice": choice}
    response = await post(roomy, CHAT, **fields, tools=tools)
    assert response.status_code == 400
    assert "properties.id.const has the number 1234567890123456789" in response.text
    free = await post(roomy, CHAT, messages=f"[{USER}]", tools=function(schema))
    assert free.status_code == 200, "without a grammar, the model only reads the number"


@pytest.mark.parametrize("number", ["1e400", "-1E999", "1" + "0" * 400])
async def test_number_beyond_doubles_is_a_400_that_names_it(number: str, served: Served) -> None:
    shown = number if len(number) < 40 else number[:20]
    for fields in ({"seed": number}, {"tools": function(f'{{"enum": [{number}]}}')}):
        response = await post(served, CHAT, messages=f"[{USER}]", **fields)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"
        assert shown in response.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "01", "1."])
async def test_what_is_no_number_of_json_is_a_400(number: str, served: Served) -> None:
    schema = f'{{"enum": [1234567890123456789, {number}]}}'
    response = await post(served, CHAT, messages=f"[{USER}]", tools=function(schema))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_settings_take_long_decimals_and_refuse_long_integers(served: Served) -> None:
    """A setting is a double by definition."""
    response = await post(
        served, CHAT, messages=f"[{USER}]", temperature="0.7000000000000000000001", top_p="1.0"
    )
    assert response.status_code == 200
    assert served.engine.requests[0].params.temperature == 0.7
    bias = await post(
        served, CHAT, messages=f"[{USER}]", logit_bias='{"5": -1.00000000000000000001}'
    )
    assert bias.status_code == 200
    for name in ("max_tokens", "seed", "n", "temperature", "top_k"):
        long = {name: "100000000000000000001"}
        refused = await post(served, CHAT, messages=f"[{USER}]", **long)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_template_arguments_may_have_long_numbers(served: Served) -> None:
    response = await post(
        served, CHAT, messages=f"[{USER}]", chat_template_kwargs=f'{{"enable_thinking": {OBJECT}}}'
    )
    assert response.status_code == 200, response.text
