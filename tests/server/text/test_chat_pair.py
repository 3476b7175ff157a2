"""Pairs of texts by a chat template, and templates that cannot write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.text.chat_pair import ChatPair, read_chat_pair
from server.text.chat_template import ChatTemplate
from tests.support.render_here import RenderHere

IN_ORDER = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
IN_PARTS = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }};{% endfor %}"
SWAPPED = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"


def read(source: str, prompt: str = "", **options: object) -> ChatPair:
    template = ChatTemplate(source, {}, frozenset(), RenderHere(source.encode()))
    return read_chat_pair(template, Path("folder"), prompt, options)


@pytest.mark.parametrize("source", [IN_ORDER, IN_PARTS])
def test_chat_pair_texts_stand_in_the_messages_of_their_roles(source: str) -> None:
    assert read(source).text(" q ", "d") == "query:  q ;document: d;"
    assert read(source, "find").text("q", "d") == "system: find;query: q;document: d;"


def test_chat_pair_document_may_come_first() -> None:
    assert read(SWAPPED).text("q", "d") == "d|q|"


def test_chat_pair_template_gets_the_options() -> None:
    source = IN_ORDER + "{% if add_generation_prompt %}answer{% endif %}{{ task }}"
    assert read(source).after == ";"
    assert read(source, add_generation_prompt=True, task="x").after == ";answerx"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
        "{{ raise_exception('only users') }}",
    ],
)
def test_chat_pair_template_that_does_not_write_both_raises_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="roles query and document"):
        read(source)
