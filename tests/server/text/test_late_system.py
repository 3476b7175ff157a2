"""System messages behind others: shown where they are, or merged where the template needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.text.chat_template import ChatTemplate, TemplateError
from server.text.content_parts import with_system_first
from server.text.load_template import TemplateFile, open_template

pytestmark = pytest.mark.usefixtures("renders_here")

LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As Qwen3.5, Mistral Nemo, SmolLM3 and gpt-oss, DeepSeek R1, DeepSeek V3.1, and Gemma 2 do it.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TURNS = (
    "{% set s = 'S' if messages[0].role == 'system' else '' %}{% if s %}[system]"
    "{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
LAST_ONE = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}[system]{{ ns.system }}"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
COLLECTS = (
    "[system]{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def template_of(source: str) -> ChatTemplate:
    return open_template(TemplateFile(source, Path("chat_template.jinja")), {})


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


LATE = [message("user", "Q"), message("system", "S"), message("assistant", "A")]


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (LOOP, "[user]Q[system]S[assistant]A"),
        (STRICT, "[system]S[user]Q[assistant]A"),
        (TURNS, "[system]S[user]Q[assistant]A"),
        (DROPS, "[system]S[user]Q[assistant]A"),
        (LAST_ONE, "[system]S[user]Q[assistant]A"),
        (COLLECTS, "[system]S[user]Q[assistant]A"),
    ],
    ids=["loop", "strict", "turns", "drops", "last-one", "collects"],
)
async def test_late_system_message_is_always_shown(source: str, prompt: str) -> None:
    assert await template_of(source).render_async(LATE) == prompt


async def test_system_messages_are_merged_in_their_order() -> None:
    parts = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]
    chat = [message("system", parts), *LATE, message("user", "Q2")]
    text = await template_of(DROPS).render_async(chat)
    assert text == "[system]S1\n\nS2\n\nS[user]Q[assistant]A[user]Q2"


def test_users_turns_that_become_neighbours_are_one() -> None:
    chat = [message("user", "Q"), message("system", "S"), message("user", "R")]
    assert with_system_first(chat) == [message("system", "S"), message("user", "Q\nR")]
    twice = [message("user", "Q"), message("user", "R"), message("system", "S")]
    assert with_system_first(twice) == [message("system", "S"), *twice[:2]]


async def test_template_without_a_system_role_still_refuses_it() -> None:
    template = template_of(NONE)
    assert not template.wants_system_first
    with pytest.raises(TemplateError, match="no system role"):
        await template.render_async(LATE)


async def test_chat_that_begins_with_its_only_system_message_is_not_changed() -> None:
    chat = [message("system", "S"), message("user", "Q"), message("user", "R")]
    assert await template_of(DROPS).render_async(chat) == "[system]S[user]Q[user]R"
