"""Messages of Anthropic's API become messages of a chat template, and tools those of a request."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.anthropic.schemas import CountTokensBody
from server.generation.chat_prompt import Chat
from server.generation.thinking import Thinking
from server.text.content_parts import text_parts
from server.text.tools import NO_TOOLS

CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def chat_of(*messages: Any, **fields: Any) -> Chat:
    return CountTokensBody.model_validate({"messages": [*messages], **fields}).chat()


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*content]}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def test_string_stays_a_text_and_blocks_become_parts() -> None:
    chat = chat_of({"role": "user", "content": "a"}, system="Be brief.")
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
    ]
    chat = chat_of(user(text("a"), text("b")), system=[text("Be"), text("brief.")])
    assert chat.messages == [
        {"role": "system", "content": text_parts(["Be", "brief."])},
        {"role": "user", "content": text_parts(["a", "b"])},
    ]
    assert chat.add_generation_prompt
    assert not chat.continue_final_message


def test_empty_system_message_alone_is_kept() -> None:
    assert chat_of({"role": "system", "content": []}).messages == [
        {"role": "system", "content": ""}
    ]


def test_tool_results_become_messages_and_texts_follow() -> None:
    second = {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}}
    chat = chat_of(
        user(text("Weather and time?")),
        assistant(text("I look."), CALL, second),
        user(
            text("And tomorrow?"),
            result([text("sunny"), text("20 °C")]),
            {"type": "tool_result", "tool_use_id": "toolu_2"},
        ),
    )
    calls = chat.messages[1].pop("tool_calls")
    assert calls == [
        {
            "id": "toolu_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris"}},
        },
        {"id": "toolu_2", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    assert chat.messages[1:] == [
        {"role": "assistant", "content": "I look."},
        {
            "role": "tool",
            "tool_call_id": "toolu_1",
            "content": text_parts(["sunny", "20 °C"]),
            "name": "weather",
        },
        {"role": "tool", "tool_call_id": "toolu_2", "content": "", "name": "time"},
        {"role": "user", "content": "And tomorrow?"},
    ]


def test_tool_result_alone_adds_no_user_message_and_marks_an_error() -> None:
    chat = chat_of(user(text("a")), assistant(CALL), user(result("no such city", is_error=True)))
    assert chat.messages[1]["content"] is None
    assert chat.messages[2:] == [
        {
            "role": "tool",
            "tool_call_id": "toolu_1",
            "content": "Error: no such city",
            "name": "weather",
        }
    ]


def test_thinking_becomes_reasoning_content() -> None:
    thinking = {"type": "thinking", "thinking": "Paris is it.", "signature": "x"}
    chat = chat_of(user(text("a")), assistant(thinking, text("Paris")), user(text("b")))
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "Paris",
        "reasoning_content": "Paris is it.",
    }


def test_omitted_thoughts_come_back_by_their_signature() -> None:
    omitted = {"type": "thinking", "thinking": "", "signature": "thoughts-SG0u"}
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAh"}
    chat = chat_of(user(text("a")), assistant(omitted, text("b")), user(text("c")))
    assert chat.messages[1]["reasoning_content"] == "Hm."
    chat = chat_of(user(text("a")), assistant(foreign, text("b")), user(text("c")))
    assert chat.messages[1]["reasoning_content"] == ""


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    chat = chat_of(
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        assistant(text("d"), CALL),
        user(result("sunny")),
        user(text("e")),
        {"role": "system", "content": "f"},
    )
    found = [(message["role"], message["content"]) for message in chat.messages]
    assert found == [
        ("user", "a\nb"),
        ("assistant", "cd"),
        ("tool", "sunny"),
        ("user", "e"),
        ("system", "f"),
    ]


def test_last_assistant_message_is_continued() -> None:
    chat = chat_of(user(text("a")), {"role": "assistant", "content": "It is"})
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ("x-anthropic-billing-header: cch=1f2;\nBe brief.", "Be brief."),
        ("Be brief.\nx-anthropic-billing-header: cch=1f2;", "Be brief.\n"),
        ([text("x-anthropic-billing-header: cch=1f2;"), text("Be brief.")], "Be brief."),
        ("About x-anthropic-billing-header: a name.", "About x-anthropic-billing-header: a name."),
        ([text("x-anthropic-billing-header: cch=1f2;")], None),
        ("", None),
        ([], None),
    ],
)
def test_system_text_loses_the_billing_header_only(system: Any, left: str | None) -> None:
    chat = chat_of(user(text("a")), system=system)
    first = chat.messages[0]
    assert (first["content"] if first["role"] == "system" else None) == left


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"output_config": {"effort": "high"}}, Thinking("high")),
        ({"thinking": {"type": "adaptive"}}, Thinking(is_on=True)),
        ({"thinking": {"type": "disabled"}}, Thinking(is_on=False)),
        (
            {
                "output_config": {"effort": "low"},
                "thinking": {"type": "enabled", "budget_tokens": 2048},
            },
            Thinking("low", is_on=True, budget=2048),
        ),
    ],
)
def test_thinking_and_effort_are_those_of_every_api(
    fields: dict[str, Any], thinking: Thinking
) -> None:
    assert chat_of(user(text("a")), **fields).thinking == thinking


def test_tools_become_those_of_the_chat_api() -> None:
    strict = {"name": "time", "input_schema": {}, "strict": True, "type": "custom"}
    use = chat_of(user(text("a")), tools=[WEATHER, strict]).tool_use
    assert (use.mode, use.name, use.allows_parallel) == ("auto", None, True)
    weather, time = use.tools
    assert weather.for_template == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": WEATHER["input_schema"],
        },
    }
    assert (weather.name, weather.parameters) == ("weather", WEATHER["input_schema"])
    assert (weather.is_strict, time.is_strict) == (False, True)
    assert time.for_template["function"] == {
        "name": "time",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        ({"type": "auto"}, "auto", None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "weather"}, "required", "weather", True),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_tool_choice_becomes_mode_and_name(
    choice: dict[str, Any], mode: str, name: str | None, parallel: bool
) -> None:
    use = chat_of(user(text("a")), tools=[WEATHER], tool_choice=choice).tool_use
    assert (use.mode, use.name, use.allows_parallel) == (mode, name, parallel)
    assert (use.param, use.choice_param) == ("tools", "tool_choice")


def test_request_without_tools_uses_none() -> None:
    chat = chat_of(user(text("a")), tools=[], tool_choice={"type": "auto"})
    assert chat.tool_use is NO_TOOLS
