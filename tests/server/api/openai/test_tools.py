"""Tools and reasoning over HTTP: chat completions with a template that knows neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.api.openai.schemas.chat import ChatMessage
from server.text.tools import MAX_CALLS
from tests.server.conftest import encode, model, says, write_model
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.hostile_tools import HOSTILE_PARAMETERS
from tests.support.rig import Served, serving

__all__ = ["encode", "model", "says"]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f"Let me see.\n{CALL}\n{CALL}"


def engine_of(script: Any) -> FakeEngine:
    """Return an engine with room for tools: each of their bytes is a token."""
    return FakeEngine(script, info=msgspec.structs.replace(INFO, max_model_len=4096))


async def streamed(served: Served, **fields: Any) -> dict[str, Any]:
    """Return the message and finish reason of a stream, joined as clients join it."""
    response = await served.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return {"message": message, "finish_reason": finish}


async def test_calls_are_the_same_in_stream_and_whole_answer(model: Path, says) -> None:
    async with serving(engine_of(says(TWO)), model) as served:
        whole = (await served.chat(tools=[WEATHER])).json()["choices"][0]
        stream = await streamed(served, tools=[WEATHER])
    assert whole["finish_reason"] == stream["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == stream["message"]["content"] == "Let me see."
    calls = whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == stream["message"]["tool_calls"]
    assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert len({call["id"] for call in calls}) == 2
    assert all(call["type"] == "function" and "index" not in call for call in calls)


async def test_answer_of_calls_alone_has_null_content(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        message = (await served.chat(tools=[WEATHER])).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_answer_without_calls_has_no_tool_calls(model: Path, says) -> None:
    async with serving(engine_of(says("Hello <b> ")), model) as served:
        choice = (await served.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello <b> ", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("length", range(1, len(CALL), 7))
async def test_cut_call_ends_with_length(model: Path, says, length: int) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        fields = {"tools": [WEATHER], "max_tokens": length}
        whole = (await served.chat(**fields)).json()["choices"][0]
        stream = await streamed(served, **fields)
    assert whole["finish_reason"] == stream["finish_reason"] == "length"
    assert not whole["message"]["content"]
    for call in whole["message"].get("tool_calls", ()):
        assert '{"city": "Rome"}'.startswith(call["function"]["arguments"])


async def test_model_reads_the_tools_and_their_results(model: Path, says) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with serving(engine_of(says("x")), model) as served:
        assert (await served.chat(tools=[WEATHER], messages=messages)).status_code == 200
        await served.chat(tools=[WEATHER], tool_choice="none")
        with_tools, without = (
            served.app.state.penstock.tokenizer.decode(request.prompt)
            for request in served.engine.requests
        )
    assert with_tools.startswith("<system>Be brief.\n\nYou can call functions.")
    assert '"name": "weather"' in with_tools
    assert (
        '<assistant><tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in with_tools
    )
    assert "<user><tool_response>\nsunny\n</tool_response>" in with_tools
    assert without == "<user>Hi\n<assistant>"


async def test_tool_choice_none_leaves_markup_as_content(model: Path, says) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        response = await served.chat(tools=[WEATHER], tool_choice="none")
    assert response.json()["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_choice_holds_the_answer_to_a_grammar(model: Path, says, fields, held) -> None:
    async with serving(engine_of(says(CALL)), model) as served:
        response = await served.chat(tools=[WEATHER], **fields)
        (request,) = served.engine.requests
    assert response.status_code == 200
    assert (request.params.grammar is not None) == held
    is_named = isinstance(fields.get("tool_choice"), dict)
    expected = "stop" if is_named else "tool_calls"  # as OpenAI's own API ends a named call
    assert response.json()["choices"][0]["finish_reason"] == expected


async def test_strict_tool_holds_calls_also_in_auto(model: Path, says) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with serving(engine_of(says(CALL)), model) as served:
        await served.chat(tools=[strict])
        (request,) = served.engine.requests
    assert request.params.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_after_one(model, says, stream) -> None:
    async with serving(engine_of(says(TWO)), model) as served:
        fields = {"tools": [WEATHER], "parallel_tool_calls": False}
        if stream:
            answer = await streamed(served, **fields)
        else:
            answer = (await served.chat(**fields)).json()["choices"][0]
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": "f"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_refused_by_name(model: Path, says, fields, param) -> None:
    async with serving(engine_of(says("x")), model) as served:
        response = await served.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_allowed_tools_hide_the_others_and_may_require_a_call(model: Path, says) -> None:
    tools = [WEATHER, {"type": "function", "function": {"name": "now"}}]
    async with serving(engine_of(says(CALL)), model) as served:
        for mode in ("auto", "required"):
            response = await served.chat(tools=tools, tool_choice=allowed(mode, "weather"))
            assert response.status_code == 200, response.text
            (call,) = response.json()["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
        free, held = served.engine.requests
        for request in (free, held):
            prompt = served.app.state.penstock.tokenizer.decode(request.prompt)
            assert '"name": "weather"' in prompt
            assert '"name": "now"' not in prompt
    assert free.params.grammar is None
    assert held.params.grammar is not None


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "x"), "tool_choice.allowed_tools.tools.0.function.name"),
        (allowed("required"), "tool_choice"),
        (allowed("none", "weather"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "custom", "custom": {"name": "x"}}, "tool_choice"),
        ({"type": "custom", "custom": {"name": "weather"}}, "tool_choice.custom.name"),
        ({"type": "mcp", "server_label": "x"}, "tool_choice.type"),
    ],
)
async def test_wrong_tool_choice_is_refused_by_name(model: Path, says, choice, param) -> None:
    async with serving(engine_of(says("x")), model) as served:
        response = await served.chat(tools=[WEATHER], tool_choice=choice)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        path, messages = "/tokenize", [{"role": "user", "content": "Hi"}]
        body = {"messages": messages, "tools": [WEATHER], "tool_choice": choice}
        assert (await served.http.post(path, json=body)).status_code in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_ends_after_as_many_calls_as_an_answer_may_have(model, says, stream) -> None:
    info = msgspec.structs.replace(INFO, max_model_len=16384)
    async with serving(FakeEngine(says(CALL), info=info), model) as served:
        fields = {"tools": [WEATHER], "ignore_eos": True}  # it would call until the limit
        if stream:
            answer = await streamed(served, **fields)
        else:
            answer = (await served.chat(**fields)).json()["choices"][0]
    assert len(answer["message"]["tool_calls"]) == MAX_CALLS
    assert answer["finish_reason"] == "tool_calls"


async def test_thoughts_of_the_conversation_are_read_by_both_names(model: Path, says) -> None:
    for fields, thoughts in (
        ({"reasoning": "Hm."}, "Hm."),
        ({"reasoning_content": "Hm."}, "Hm."),
        ({"reasoning": "x", "reasoning_content": "Hm."}, "Hm."),
    ):
        message = ChatMessage(role="assistant", content="Yes.", **fields)
        assert message.for_template()["reasoning_content"] == thoughts


@pytest.mark.parametrize("arguments", [None, 3, ["a"]])
async def test_wrong_arguments_of_a_call_are_refused_by_name(model, says, arguments) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    async with serving(engine_of(says("x")), model) as served:
        response = await served.chat(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.tool_calls.0.function.arguments"


async def test_reasoning_is_its_own_field_and_counted(model: Path, says) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    async with serving(engine_of(says(text)), model, reasoning_parser="think") as served:
        whole = (await served.chat()).json()
        stream = await streamed(served)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    assert stream["message"]["reasoning_content"] == "Hm."
    assert stream["message"]["content"] == "Yes."
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 13}


async def test_prompt_that_opens_reasoning_begins_with_it(model: Path, says) -> None:
    text = "Hm.</think>Yes."
    async with serving(engine_of(says(text)), model, reasoning_parser="think") as served:
        opened = {"chat_template_kwargs": {"enable_thinking": True}}
        message = (await served.chat(**opened)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_calls_are_counted_by_what_they_are(model: Path, says) -> None:
    texts = [CALL, CALL.replace("weather", "x"), CALL.replace("city", "town"), "<tool_call>?"]
    async with serving(engine_of(says("\n".join(texts))), model) as served:
        assert (await served.chat(tools=[WEATHER])).status_code == 200
        lines = (await served.http.get("/metrics")).text.splitlines()
    counts = {
        line.split('result="')[1].split('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("penstock:tool_calls_total")
    }
    assert counts == {"valid": 1, "unknown_tool": 1, "invalid_arguments": 1, "malformed": 1}


async def test_logprobs_and_token_ids_cover_the_whole_answer(model: Path, says) -> None:
    async with serving(engine_of(says(TWO)), model) as served:
        response = await served.chat(tools=[WEATHER], logprobs=True, return_token_ids=True)
    choice = response.json()["choices"][0]
    assert len(choice["token_ids"]) == len(TWO) + 1
    assert len(choice["logprobs"]["content"]) == len(TWO)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "gemma4", "harmony"])
@pytest.mark.variants(3)
async def test_hostile_parameters_are_answered_or_refused(model: Path, says, parser: str) -> None:
    async with serving(engine_of(says(CALL)), model, tool_call_parser=parser) as served:
        for name, parameters in HOSTILE_PARAMETERS.items():
            function = {"name": "weather", "parameters": parameters, "strict": True}
            tools = [{"type": "function", "function": function}]
            for fields in ({"tool_choice": "required"}, {"stream": True}):
                response = await served.chat(tools=tools, **fields)
                assert response.status_code in (200, 400), name


async def test_a_thousand_tools_are_held_by_one_grammar(model: Path, says) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]
    info = msgspec.structs.replace(INFO, max_model_len=1_000_000)
    async with serving(FakeEngine(says(CALL), info=info), model) as served:
        response = await served.chat(tools=tools, tool_choice="required")
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("depth", [100, 300, 500, 900, 5000])
async def test_nested_parameters_are_answered_or_refused(model: Path, says, depth: int) -> None:
    parameters = f'{{"a": {"[" * depth}{"]" * depth}}}'
    tool = f'{{"type": "function", "function": {{"name": "weather", "parameters": {parameters}}}}}'
    messages = '[{"role": "user", "content": "Hi"}]'
    body = f'{{"messages": {messages}, "tool_choice": "required", "tools": [{tool}]}}'
    async with serving(engine_of(says(CALL)), model) as served:
        headers = {"content-type": "application/json"}
        response = await served.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code in (200, 400)


async def test_response_template_of_the_checkpoint_reads_the_calls(
    tmp_path: Path, says, caplog
) -> None:
    folder = write_model(tmp_path / "tiny")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["response_template"] = {
        "start_anchor": "<assistant>",
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>"},
            "tool_calls": {
                "open_pattern": r"<run (?P<name>\w+)>",
                "close": "</run>",
                "repeats": True,
                "content": "kv-lines",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<bye>"},
            "plan": {"open": "<plan>", "close": "</plan>"},
        },
    }
    config["chat_template"] = (  # shows tools, but no calls
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    file.write_text(json.dumps(config))
    text = "<hm>Well.</hm>One moment.<bye><run weather>\ncity: Rome\n</run>"
    async with serving(engine_of(says(text)), folder) as served:
        whole = (await served.chat(tools=[WEATHER])).json()["choices"][0]
        stream = await streamed(served, tools=[WEATHER])
        await served.chat(tools=[WEATHER], tool_choice="required")
        *_, forced = served.engine.requests
    words = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
    problems = [word["problem"] for word in words if "problem" in word]
    assert problems == ["field plan: has no place in an answer"]
    message = whole["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "One moment.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert stream["message"]["tool_calls"] == [call["function"]]
    assert "<run " in forced.params.grammar.source


async def test_continued_answer_is_held_and_parsed_like_a_new_one(model: Path, says) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see."},
    ]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "messages": messages}
    async with serving(engine_of(says(CALL)), model) as served:
        response = await served.chat(tools=[WEATHER], tool_choice="required", **fields)
        (request,) = served.engine.requests
    (choice,) = response.json()["choices"]
    assert request.params.grammar is not None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_forced_tool_with_many_name_patterns_is_refused(model: Path, says, choice) -> None:
    """Compiling them takes seconds, and other grammars wait."""
    parameters = {"type": "object", "patternProperties": {f"^{n}": {} for n in range(200)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serving(engine_of(says("x")), model) as served:
        response = await served.chat(tools=[tool], tool_choice=choice)
    assert response.status_code == 400
    assert "200 patternProperties" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"
