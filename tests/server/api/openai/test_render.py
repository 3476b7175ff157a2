"""POST /v1/chat/completions/render: the prompt of a chat, its tokens, and warnings about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.conftest import BOS, EOS
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

PATH = "/v1/chat/completions/render"
USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be brief."}
WHOLE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ONLY_USERS = "{{ bos_token }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


async def rendered(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.http.post(PATH, json={"messages": [USER], **fields})
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    return body


async def test_render_returns_the_prompt_that_a_chat_gets(served: Served) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Hé <s>"}]
    body = await rendered(served, messages=messages, max_tokens=3)
    text = "<s><system>Be brief.\n<user>Hé <s>\n<assistant>"
    assert body["prompt"] == text
    assert body["count"] == len(body["token_ids"]) == len(body["token_strs"])
    assert (body["model"], body["max_model_len"]) == ("tiny", 512)
    await served.chat(messages=messages)
    assert body["token_ids"] == served.engine.requests[0].prompt
    assert len(served.engine.requests) == 1, "rendering sends nothing to the engine"


async def test_render_offsets_are_where_tokens_begin_in_the_prompt(served: Served) -> None:
    body = await rendered(served, messages=[{"role": "user", "content": "é b"}])
    assert body["token_ids"][0] == BOS
    place = body["prompt"].index("é")
    start = body["offsets"].index(place)
    assert body["offsets"][:2] == [0, 3], "the text of BOS has three characters"
    assert body["offsets"][start : start + 4] == [place, place, place + 1, place + 2]
    assert body["token_strs"][start : start + 4] == ["Ã", "©", "Ġ", "b"]


async def test_render_says_how_many_tokens_the_prefix_cache_has(served: Served) -> None:
    assert (await rendered(served))["cached_tokens"] == 0
    served.engine.cached_tokens = 3
    assert (await rendered(served))["cached_tokens"] == 3
    long = {"role": "user", "content": "x" * 600}
    assert (await rendered(served, messages=[long]))["cached_tokens"] == 0


async def test_render_sound_chat_has_no_warnings(served: Served) -> None:
    call = {"function": {"name": "find", "arguments": '{"a": 1}'}}
    messages = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": " a result\n"},
    ]
    assert (await rendered(served, messages=messages))["lint"] == []


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("{{ bos_token }}" + WHOLE, {}, [("two_bos", None)]),
        (WHOLE.removeprefix("{{ bos_token }}"), {}, [("no_bos", None)]),
        (WHOLE + "{{ 'assistant: ' }}", {}, [("trailing_space", None)]),
        (
            WHOLE,
            {"chat_template_kwargs": {"thinking": True}},
            [("unread_argument", "chat_template_kwargs.thinking")],
        ),
        (
            ONLY_USERS,
            {"messages": [SYSTEM, USER]},
            [("system_message_dropped", "messages.0.content")],
        ),
        (
            ONLY_USERS,
            {"messages": [USER, {"role": "assistant", "content": "a\nb"}, USER]},
            [("content_not_shown", "messages.1.content")],
        ),
        (
            WHOLE,
            {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "odd"}]},
            [("reasoning_not_shown", "messages.1.reasoning_content")],
        ),
        (
            WHOLE,
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"function": {"name": "f0"}}],
                    },
                ]
            },
            [("tool_call_not_shown", "messages.1.tool_calls.0")],
        ),
        (
            WHOLE,
            {"messages": [{"role": "user", "content": "no </s> end"}]},
            [("special_token_in_content", "messages.0.content")],
        ),
        (
            WHOLE,
            {"messages": [{"role": "user", "content": "x" * 600}]},
            [("context_length_exceeded", "messages")],
        ),
        (
            WHOLE + "{% if messages[0].role == 'system' %}{% endif %}",
            {},
            [("no_system_message", "messages")],
        ),
        (
            WHOLE + '{% if messages[0].role == "system" %}{% endif %}',
            {"messages": [SYSTEM, USER]},
            [],
        ),
        # Templates may trim or quote a content without a warning.
        ("{{ bos_token }}{{ messages[0].content | trim }}", {}, []),
        (
            "{{ bos_token }}{{ messages[0] | tojson }}",
            {"messages": [{"role": "user", "content": 'a "b"\né'}]},
            [],
        ),
        (
            "{{ bos_token }}{{ messages[0].content.split('</think>')[-1] }}",
            {"messages": [{"role": "assistant", "content": "hm</think>Yes"}]},
            [],
        ),
    ],
)
async def test_render_suspicious_prompt_is_warned_about(
    model: Path,
    tmp_path: Path,
    says: Callable[[str], Script],
    template: str,
    fields: dict[str, Any],
    expected: list[tuple[str, str | None]],
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    async with serving(FakeEngine(says("x")), model, chat_template=str(file)) as served:
        body = await rendered(served, **fields)
    assert [(warning["code"], warning["param"]) for warning in body["lint"]] == expected
    assert all(warning["message"].endswith(".") for warning in body["lint"])


async def test_render_many_dropped_messages_gives_limited_warnings(
    model: Path, tmp_path: Path, says: Callable[[str], Script]
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ bos_token }}nothing")
    messages = [{"role": "user", "content": f"number {index}"} for index in range(100)]
    async with serving(FakeEngine(says("x")), model, chat_template=str(file)) as served:
        assert len((await rendered(served, messages=messages))["lint"]) == 32


async def test_render_invalid_chat_is_refused(served: Served) -> None:
    refused: list[dict[str, Any]] = [{"messages": []}, {"messages": [USER], "temperature": 9}, {}]
    refused += [
        {"messages": [USER], name: [258]} for name in ("allowed_token_ids", "stop_token_ids")
    ]
    refused.append({"messages": [USER], "logit_bias": {"258": 1}})
    for fields in refused:
        assert (await served.http.post(PATH, json=fields)).status_code == 400
    response = await served.http.post(PATH, json={"messages": [USER], "foo": 1})
    assert response.headers["x-ignored-params"] == "foo"


WEATHER = {"type": "function", "function": {"name": "weather", "description": "the weather"}}
SHOWN = WHOLE + "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
CALLED = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [WHOLE, SHOWN + CALLED], ids=["system message", "template"])
@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_render_and_tokenize_show_tools_as_a_chat_does(
    model: Path, tmp_path: Path, says: Callable[[str], Script], template: str, choice: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    engine = FakeEngine(says("x"), info=replace(INFO, max_model_len=4096))
    fields = {"messages": [USER], "tools": [WEATHER], "tool_choice": choice}
    async with serving(engine, model, chat_template=str(file)) as served:
        body = await rendered(served, **fields)
        tokens = (await served.http.post("/tokenize", json=fields)).json()["tokens"]
        await served.chat(**fields)
    assert ("weather" in body["prompt"]) == (choice == "auto")
    assert body["lint"] == []
    assert body["token_ids"] == tokens == engine.requests[0].prompt


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_render_and_tokenize_choice_without_tools_is_refused(
    served: Served, path: str
) -> None:
    fields = {"messages": [USER], "tool_choice": "required"}
    response = await served.http.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


async def test_tokenize_tools_of_a_prompt_are_refused(served: Served) -> None:
    response = await served.http.post("/tokenize", json={"prompt": "a", "tools": [WEATHER]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_tokenize_token_strs_are_vocabulary_entries(served: Served) -> None:
    fields = {"prompt": " é", "return_token_strs": True}
    body = (await served.http.post("/tokenize", json=fields)).json()
    assert body["token_strs"] == ["<s>", "Ġ", "Ã", "©"]
    assert EOS not in body["tokens"]
