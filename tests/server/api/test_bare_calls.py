"""Calls in formats without marks, Llama's JSON and Python's, over HTTP in all chat APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.cli.banner import answers as banner_of
from tests.server.api.openai.test_tools import engine_of, streamed
from tests.server.conftest import encode, says, write_model
from tests.support.rig import Served, serving

__all__ = ["encode", "says"]

TURNS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}CALLS{% else %}{{ m.content }}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
JSON_CALL = (
    "{{ '{\"name\": ' ~ (c.function.name | tojson) ~ ', \"parameters\": '"
    " ~ (c.function.arguments | tojson) ~ '}' }}"
)
LLAMA = TURNS.replace(
    "CALLS",
    f"{{% for c in m.tool_calls %}}{JSON_CALL}{{{{ '; ' if not loop.last }}}}{{% endfor %}}",
)
ONE_CALL = TURNS.replace(
    "CALLS",
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    f"{{% set c = m.tool_calls[0] %}}{JSON_CALL}",
)
PYTHONIC = TURNS.replace(
    "CALLS",
    "[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
)
# Keys that no format of the table has.
OWN_KEYS = LLAMA.replace('"name"', '"tool"').replace('"parameters"', '"args"')
# As above, but the prompt for an answer differs from what precedes an answer of the history.
OTHER_PROMPT = LLAMA.replace("<assistant>", "<go>")
THINKING = LLAMA.replace("<assistant>", "<assistant><think>\n")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (FUNCTION, NOW)]
ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
CLOCK = '{"name": "now", "parameters": {}}'
TWO = [("weather", {"city": "Rome"}), ("now", {})]
ANSWERS = [
    (LLAMA, f"{ROME}; {CLOCK}"),
    (LLAMA, f"{ROME}\n{CLOCK}"),
    (LLAMA, f" \n<|python_tag|>{ROME};{CLOCK}"),
    (LLAMA, f"[{ROME}, {CLOCK}]"),
    (OTHER_PROMPT, f"{ROME}; {CLOCK}"),
    (ONE_CALL, f"{ROME}; {CLOCK}"),
    (OWN_KEYS, '{"tool": "weather", "args": {"city": "Rome"}}; {"tool": "now", "args": {}}'),
    (PYTHONIC, '[weather(city="Rome"), now()]'),
    (PYTHONIC, "[weather(city='Rome')]\n[now()]"),
]


def folder_of(tmp_path: Path, template: str) -> Path:
    folder = write_model(tmp_path / "tiny")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
    return folder


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in functions]


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
async def test_calls_are_read_in_every_api(tmp_path: Path, says, template, answer) -> None:
    async with serving(engine_of(says(answer)), folder_of(tmp_path, template)) as served:
        (line,) = banner_of(served.app.state.penstock.answers)
        whole = (await served.chat(tools=TOOLS)).json()["choices"][0]
        stream = await streamed(served, tools=TOOLS)
        responses = await in_responses(served)
        messages = await served.message(
            tools=[{"name": f["name"], "input_schema": f["parameters"]} for f in (FUNCTION, NOW)]
        )
    assert "reads its own calls back" in line
    assert whole["message"]["content"] is None
    assert called(whole["message"]) == TWO
    assert whole["finish_reason"] == stream["finish_reason"] == "tool_calls"
    assert stream["message"]["content"] == ""
    streamed_calls = stream["message"]["tool_calls"]
    assert streamed_calls == [call["function"] for call in whole["message"]["tool_calls"]]
    assert responses == TWO
    blocks = messages.json()["content"]
    assert [(block["name"], block["input"]) for block in blocks] == TWO


async def in_responses(served: Served) -> list[tuple[str, Any]]:
    tools = [{"type": "function", **function} for function in (FUNCTION, NOW)]
    body = {"input": "Hi", "tools": tools}
    output = (await served.http.post("/v1/responses", json=body)).json()["output"]
    return [(item["name"], json.loads(item["arguments"])) for item in output]


@pytest.mark.parametrize("template", [LLAMA, PYTHONIC])
@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 3}', '{"name": "weather", "age": 3}', "[1, 2]", "[weather (sunny)]",
     '{"name": "rain", "parameters": {}}', f"Well: {ROME}", "It rains.", "<|python_tag|>print(1)"],
)  # fmt: skip
async def test_other_answers_are_content(tmp_path: Path, says, template, text) -> None:
    async with serving(engine_of(says(text)), folder_of(tmp_path, template)) as served:
        whole = (await served.chat(tools=TOOLS)).json()["choices"][0]
        stream = await streamed(served, tools=TOOLS)
    assert whole["message"]["content"] == stream["message"]["content"] == text
    assert whole["finish_reason"] == stream["finish_reason"] == "stop"


@pytest.mark.parametrize(("template", "answer"), ANSWERS[:1] + ANSWERS[-2:-1])
async def test_forced_calls_are_held_to_the_format(tmp_path: Path, says, template, answer) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    async with serving(engine_of(says(answer)), folder_of(tmp_path, template)) as served:
        required = await served.chat(tools=TOOLS, tool_choice="required")
        forced = await served.chat(tools=TOOLS, tool_choice=named)
        single = await served.chat(tools=TOOLS, parallel_tool_calls=False)
        none = await served.chat(tools=TOOLS, tool_choice="none")
        grammars = [request.params.grammar for request in served.engine.requests]
    assert called(required.json()["choices"][0]["message"]) == TWO
    assert called(forced.json()["choices"][0]["message"]) == TWO[:1]
    assert called(single.json()["choices"][0]["message"]) == TWO[:1]
    assert none.json()["choices"][0]["message"]["content"] == answer
    assert [grammar is not None for grammar in grammars] == [True, True, False, False]
    assert "now" in grammars[0].source
    assert "now" not in grammars[1].source


async def test_calls_after_reasoning_are_read(tmp_path: Path, says) -> None:
    text = f"Rome, then.\n</think>\n\n{ROME}"
    async with serving(engine_of(says(text)), folder_of(tmp_path, THINKING)) as served:
        whole = (await served.chat(tools=TOOLS)).json()["choices"][0]["message"]
        stream = (await streamed(served, tools=TOOLS))["message"]
        await served.chat(tools=TOOLS, tool_choice="required")
        *_, required = served.engine.requests
    assert whole["reasoning_content"] == stream["reasoning_content"] == "Rome, then."
    assert called(whole) == TWO[:1]
    assert stream["tool_calls"] == [call["function"] for call in whole["tool_calls"]]
    assert "</think>" in required.params.grammar.source


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (LLAMA, f"<assistant>{ROME}; {CLOCK}\n<tool>18 degrees\n<tool>noon\n"),
        (ONE_CALL, f"<assistant>{ROME}\n<tool>18 degrees\n<assistant>{CLOCK}\n<tool>noon\n"),
        (PYTHONIC, '<assistant>[weather(city="Rome"), now()]\n<tool>18 degrees\n<tool>noon\n'),
    ],
)
async def test_calls_of_the_history_are_rendered(tmp_path: Path, says, template, shown) -> None:
    """A template that refuses two calls in one message gets two messages."""
    calls = [
        {"id": "a", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": "18 degrees"},
    ]
    if template is not ONE_CALL:
        messages[2:] = [messages[3], messages[2]]
    body = {"messages": messages, "tools": TOOLS}
    async with serving(engine_of(says("x")), folder_of(tmp_path, template)) as served:
        response = await served.http.post("/v1/chat/completions/render", json=body)
    assert shown in response.json()["prompt"]
