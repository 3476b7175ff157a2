"""A model with a chat template named tool_use: it renders the chats with tools, on every route."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.cli.banner import answers
from tests.server.conftest import encode, says, write_model
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

__all__ = ["encode", "says"]

DEFAULT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
TOOL_USE = (
    "{{ bos_token }}<tools>{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(params=["list", "files"])
async def served(request: Any, tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    """A server whose model answers each request with a call."""
    folder = write_model(tmp_path / "tiny")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    if request.param == "list":
        named = {"default": DEFAULT, "tool_use": TOOL_USE}
        found = [{"name": name, "template": source} for name, source in named.items()]
        settings["chat_template"] = found
    else:
        (folder / "chat_template.jinja").write_text(DEFAULT)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE)
    file.write_text(json.dumps(settings))
    engine = FakeEngine(says(CALL), info=msgspec.structs.replace(INFO, max_model_len=4096))
    async with serving(engine, folder) as running:
        yield running


async def test_chat_with_tools_has_their_template_and_its_calls_are_read(served: Served) -> None:
    choice = (await served.chat(tools=[TOOL])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Rome"}',
    }
    assert (await served.chat()).json()["choices"][0]["message"]["content"] == CALL
    await served.chat(tools=[TOOL], tool_choice="none")
    decode = served.app.state.penstock.tokenizer.decode
    prompts = [
        decode(request.prompt, skip_special_tokens=False) for request in served.engine.requests
    ]
    assert prompts[0].startswith('<s><tools>[{"type": "function"')
    assert prompts[0].endswith("<user>Hi<assistant>")
    assert prompts[1:] == ["<s><user>Hi"] * 2


async def test_rendered_prompts_are_those_of_each_template(served: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, key in (("/v1/chat/completions/render", "prompt"), ("/tokenize", None)):
        plain = (await served.http.post(path, json=body)).json()
        with_tools = (await served.http.post(path, json={**body, "tools": [TOOL]})).json()
        assert plain["count"] < with_tools["count"]
        if key:
            assert plain[key] == "<s><user>Hi"
            assert "weather" in with_tools[key]
            assert with_tools["lint"] == []


async def test_arguments_that_the_template_in_use_does_not_read_are_named(served: Served) -> None:
    arguments = {"chat_template_kwargs": {"enable_thinking": True}}
    plain = await served.chat(**arguments)
    with_tools = await served.chat(tools=[TOOL], **arguments)
    header = "x-ignored-params"
    ignored = [response.headers.get(header, "") for response in (plain, with_tools)]
    assert "enable_thinking" not in ignored[0]
    assert "enable_thinking" in ignored[1]


async def test_anthropic_messages_with_tools_have_their_template(served: Served) -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    answer = (await served.message(tools=[tool])).json()
    assert answer["content"][0]["type"] == "tool_use"
    prompt = served.app.state.penstock.tokenizer.decode(served.engine.requests[0].prompt)
    assert prompt.startswith("<tools>")


async def test_server_says_that_the_template_shows_tools(served: Served) -> None:
    found = (await served.http.get("/capabilities")).json()["tool_calling"]
    assert (found["format"], found["shown_by"]) == ("hermes", "template")
    assert found["round_trips"] is True
    info = (await served.http.get("/tokenizer_info")).json()
    assert (info["chat_template"], info["tool_use_template"]) == (DEFAULT, TOOL_USE)
    state = served.app.state.penstock
    (line,) = answers(state.answers, state.template)
    assert "the chat template (chats with tools have the one named tool_use)" in line
    assert line.endswith("reads its own calls back")


async def test_tool_use_template_without_calls_is_used_and_read_as_hermes(
    tmp_path: Path, says: Any
) -> None:
    """The commonest format is a guess. The tools are not described a second time."""
    folder = write_model(tmp_path / "tiny")
    file = folder / "tokenizer_config.json"
    named = {"default": DEFAULT, "tool_use": "T{{ tools | tojson }}{{ messages[0].content }}"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    engine = FakeEngine(says(CALL), info=msgspec.structs.replace(INFO, max_model_len=4096))
    async with serving(engine, folder) as served:
        for choice in ("auto", "required"):
            answer = (await served.chat(tools=[TOOL], tool_choice=choice)).json()
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert (await served.chat()).json()["choices"][0]["message"]["content"] == CALL
        prompt = served.app.state.penstock.tokenizer.decode(served.engine.requests[0].prompt)
        found = (await served.http.get("/capabilities")).json()["tool_calling"]
        state = served.app.state.penstock
        (line,) = answers(state.answers, state.template)
    assert prompt.startswith("T[{")
    assert prompt.endswith("Hi")
    assert (found["format"], found["shown_by"]) == ("hermes", "template")
    assert "hermes, because the template tool_use shows no calls" in line
