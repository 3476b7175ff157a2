"""Bodies of /v1/responses: what is applied, refused, and named as ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.responses.schemas import ResponsesBody
from server.generation.thinking import Thinking
from server.http.errors import to_api_error
from server.text.tools import Tool, ToolUse
from server.text.wanted_grammar import WantedGrammar

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SUB: dict[str, Any] = {"type": "function", "name": "sub", "description": "Minus", "strict": True}
NO_PARAMETERS = {"type": "object", "properties": {}}
ADD_TOOL = Tool(
    "add",
    {"type": "object"},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
)
SUB_TOOL = Tool(
    "sub",
    NO_PARAMETERS,
    {
        "type": "function",
        "function": {"name": "sub", "description": "Minus", "parameters": NO_PARAMETERS},
    },
    is_strict=True,
)


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"input": "Hi", **fields})


def refusal(**fields: Any) -> tuple[str, str | None]:
    """Return the code and the param of the error that the fields cause."""
    with pytest.raises(ValidationError) as error:
        body(**fields)
    answer = to_api_error(error.value)
    assert answer.status == 400
    return answer.code, answer.param


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolUse([ADD_TOOL, SUB_TOOL])),
        ("none", ToolUse([ADD_TOOL, SUB_TOOL], "none")),
        ("required", ToolUse([ADD_TOOL, SUB_TOOL], "required")),
        ({"type": "function", "name": "sub"}, ToolUse([ADD_TOOL, SUB_TOOL], "required", "sub")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "sub"}, {"type": "web_search"}],
            },
            ToolUse([SUB_TOOL], "required"),
        ),
    ],
)
def test_tool_choice_becomes_tool_use(choice: Any, expected: ToolUse) -> None:
    assert body(tools=[ADD, SUB], tool_choice=choice).chat([]).tool_use == expected


def test_parallel_tool_calls_false_allows_one_call() -> None:
    assert not body(tools=[ADD], parallel_tool_calls=False).chat([]).tool_use.allows_parallel
    assert body(tools=[ADD], parallel_tool_calls=None).chat([]).tool_use.allows_parallel


def test_tools_of_other_servers_are_left_out_and_named() -> None:
    hosted = [
        {"type": "web_search", "search_context_size": "low"},
        {"type": "image_generation"},
        {"type": "local shell\n"},
    ]
    given = body(tools=[*hosted, ADD], tool_choice="auto")
    assert given.chat([]).tool_use.tools == [ADD_TOOL]
    assert given.ignored == ["tools.web_search", "tools.image_generation", "tools.local_shell_"]
    assert [tool["name"] for tool in given.echo()["tools"]] == ["add"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "invalid_value",
            "tool_choice",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "web_search"}},
            "unsupported_parameter",
            "tool_choice",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}},
            "invalid_value",
            "tool_choice.name",
        ),
        (
            {
                "tools": [ADD],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "invalid_value",
            "tool_choice.tools.0.name",
        ),
        ({"tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools.0.name"),
        ({"tools": [{"name": "x"}]}, "missing_required_parameter", "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools.0.name"),
        ({"tools": [5]}, "invalid_value", "tools.0"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": None}, "invalid_value", "input"),
        ({"input": 5}, "invalid_value", "input"),
        ({"input": [5]}, "invalid_value", "input"),
        ({"input": [{"type": "web_search_call"}]}, "unsupported_parameter", "input.0"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input.0.content"),
        ({"input": [{"role": "tool", "content": ""}]}, "invalid_value", "input.0.role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]},
            "unsupported_parameter",
            "input.0.content.0.type",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "missing_required_parameter",
            "input.0.arguments",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 5000}]},
            "invalid_value",
            "input",
        ),
        ({"input": [{"role": "user", "content": "a"}] * 5000}, "invalid_value", "input"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"include": ["everything"]}, "invalid_value", "include.0"),
        ({"metadata": {"a": 1}}, "invalid_value", "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "invalid_value", "metadata"),
        ({"text": {"format": {"type": "grammar"}}}, "unsupported_parameter", "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
    ],
)
def test_invalid_body_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ({"format": {"type": "text"}}, None),
        (
            {"format": {"type": "json_object"}},
            WantedGrammar("text.format", "json_schema", {"type": "object"}),
        ),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}},
            WantedGrammar("text.format.schema", "json_schema", {"type": "null"}),
        ),
    ],
)
def test_text_format_becomes_grammar(text: Any, wanted: WantedGrammar | None) -> None:
    assert body(text=text).options().grammar == wanted


def test_options_have_every_sampling_parameter() -> None:
    fields = {
        "stream": True,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "seed": 7,
        "stop": "x",
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "priority": 2,
        "cache_salt": "s",
    }
    options = body(**fields, max_output_tokens=5).options()
    found = {**vars(options), **options.sampling}
    for name, value in fields.items():
        expected = ["x"] if name == "stop" else value
        assert found[name] == expected
    assert options.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, -1),
        ({"top_logprobs": 0}, -1),
        ({"top_logprobs": 2}, 2),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"include": ["reasoning.encrypted_content"]}, -1),
    ],
)
def test_logprobs_come_on_request(fields: dict[str, Any], count: int) -> None:
    assert body(**fields).options().num_logprobs == count


def test_reasoning_effort_is_separate_from_template_arguments() -> None:
    given = body(reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": True})
    chat = given.chat([])
    assert (chat.arguments, chat.thinking) == ({"enable_thinking": True}, Thinking("low"))


def test_fields_without_effect_are_named() -> None:
    given = body(
        text={"verbosity": "low"},
        reasoning={"summary": "auto", "mode": "pro"},
        stream_options={"include_obfuscation": True},
        service_tier="auto",
        user="me",
        prompt_cache_key="k",
        safety_identifier="s",
        prompt_cache_retention="24h",
        max_tool_calls=3,
        unknown=1,
    )
    assert sorted(given.ignored) == [
        "reasoning.mode",
        "reasoning.summary",
        "stream_options.include_obfuscation",
        "text.verbosity",
        "unknown",
    ]


def test_items_that_clients_send_back_name_nothing() -> None:
    """The members of an answer's own items are known."""
    output = [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [],
            "encrypted_content": None,
            "status": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
            "namespace": None,
        },
    ]
    assert body(input=output).ignored == []
