"""Tools in the prompts of templates that read Firefunction's variable `functions`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}|" + "{{ 'f:' + functions }}"
FUNCTION = {
    "name": "add",
    "description": "Größe",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


async def applied(served: Served, **fields: Any) -> str:
    """Return the text of the prompt of a chat."""
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    tokens = list(served.engine.requests[-1].prompt)
    return str((await served.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"])


@pytest.fixture
async def open_to(
    model: Path, says: Callable[[str], Script], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Served]:
    template = tmp_path / "functions.jinja"
    template.write_text(TEMPLATE)
    settings = {"chat_template": str(template), "tool_call_parser": request.param}
    async with serving(FakeEngine(says("x")), model, **settings) as served:
        yield served


@pytest.mark.parametrize("open_to", ["firefunction"], indirect=True)
async def test_a_template_that_reads_functions_gets_the_tools_as_json(open_to: Served) -> None:
    written = (await applied(open_to, tools=TOOLS)).removeprefix("Hi|f:")
    assert json.loads(written) == [FUNCTION]
    assert "\n" in written
    assert "Größe" in written
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert await applied(open_to, **fields) == "Hi|f:"
    own = {"chat_template_kwargs": {"functions": "mine"}}
    assert await applied(open_to, **own) == "Hi|f:mine"


@pytest.mark.parametrize("open_to", ["auto"], indirect=True)
async def test_tools_of_an_unknown_call_format_are_shown_once(open_to: Served) -> None:
    prompt = await applied(open_to, tools=TOOLS)
    assert prompt.count("Größe") == 1
    assert prompt.endswith("|f:")
