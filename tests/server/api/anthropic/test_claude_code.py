"""Requests of Claude Code are served as they are: after a refusal it sends less, six times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.api.anthropic.test_writer import client_message, named_events
from tests.server.conftest import write_model
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

# A template that takes a system message at the beginning alone, and turns.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
EDIT = {
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "replace_all": {"type": "boolean"}},
    "required": ["file_path"],
}
BODY: dict[str, Any] = {
    "max_tokens": 32000,
    "stream": True,
    "system": [{"type": "text", "text": "You are Claude Code.", **CACHED}],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1"},
    "tools": [
        {"name": "Edit", "description": "Edits a file.", "input_schema": EDIT},
        {
            "name": "DeferredToolPlaceholder",
            "description": "",
            "input_schema": {"type": "object", "properties": {}},
            "defer_loading": True,
        },
    ],
}
FIRST = [
    {"role": "user", "content": [{"type": "text", "text": "Fix a.py."}]},
    {"role": "system", "content": [{"type": "text", "text": "Today is Monday.", **CACHED}]},
]
BETAS = {
    "anthropic-version": "2026-10-21",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
}


@pytest.fixture
async def strict(tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    folder = write_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(STRICT)
    info = msgspec.structs.replace(INFO, max_model_len=8192)
    engine = FakeEngine(says("<think>Hm.</think>Done."), info=info)
    async with serving(engine, folder, reasoning_parser="think") as served:
        yield served


async def answer(served: Served, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the message of a stream, and the prompt of its request."""
    body = {**BODY, "messages": messages}
    response = await served.http.post("/v1/messages", json=body, headers=BETAS)
    assert response.status_code == 200, response.text
    ids = served.engine.requests[-1].prompt
    return client_message(
        named_events(response.content)
    ), served.app.state.penstock.tokenizer.decode(ids)


async def test_session_with_late_system_messages_and_omitted_thoughts(strict: Served) -> None:
    first, prompt = await answer(strict, FIRST)
    assert "You are Claude Code." in prompt
    assert prompt.index("Today is Monday.") < prompt.index("Fix a.py.")
    thinking, done = first["content"]
    assert (thinking["thinking"], done["text"]) == ("", "Done.")
    history = [
        FIRST[0],
        {"role": "system", "content": "Today is Monday."},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "Again."},
    ]
    _, prompt = await answer(strict, history)
    assert "<think>Hm.</think>Done." in prompt


async def test_answer_that_the_context_cuts_says_so(strict: Served) -> None:
    strict.engine.script = lambda request: [65] * 9000
    cut, _ = await answer(strict, FIRST)
    assert cut["stop_reason"] == "model_context_window_exceeded"


async def test_count_is_what_the_answer_is_billed_for(strict: Served) -> None:
    message, _ = await answer(strict, FIRST)
    fields = {name: BODY[name] for name in ("system", "tools", "thinking", "output_config")}
    body = {"messages": FIRST, **fields}
    count = await strict.http.post("/v1/messages/count_tokens", json=body, headers=BETAS)
    usage = message["usage"]
    billed = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count.json() == {"input_tokens": billed}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": 7}}, "output_config.effort"),
        ({"tools": [{"name": "x", "input_schema": 3}]}, "tools.0.input_schema"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [{"type": "document", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "messages.0.content.0.content.0.type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusal_names_the_field_in_its_words(
    strict: Served, fields: dict[str, Any], name: str
) -> None:
    body = {**BODY, "messages": FIRST, **fields}
    response = await strict.http.post("/v1/messages", json=body, headers=BETAS)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name}: ")


async def test_prompt_above_the_context_is_refused_in_words_that_compact(strict: Served) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    response = await strict.http.post("/v1/messages", json={**BODY, "messages": long})
    assert response.status_code == 400
    assert "maximum context length is 8192 tokens" in response.json()["error"]["message"]
