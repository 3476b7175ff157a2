"""A server with a template that shows tools and thoughts, and the lines of its streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.api.test_capabilities import HERMES
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

THOUGHTS = "<think>\nHm.\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "a", "arguments": {"x": 1.50, "y": "\u2028"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def hermes(
    model: Path, tmp_path: Path, says: Callable[[str], Script]
) -> AsyncIterator[Served]:
    """A server that answers with thoughts and a text."""
    file = tmp_path / "hermes.jinja"
    file.write_text(HERMES)
    engine = FakeEngine(says(f"{THOUGHTS}Yes."))
    async with serving(engine, model, chat_template=str(file)) as served:
        yield served


async def ask(served: Served, path: str = "/api/chat", **body: Any) -> httpx2.Response:
    """Post a body; a chat says "Hi" unless it has messages."""
    if path == "/api/chat":
        body = {"messages": HI, **body}
    return await served.http.post(path, json=body)


def lines_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the lines of a stream. Checks their framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.content.isascii()
    assert response.content.endswith(b"\n")
    return [json.loads(each) for each in response.text.split("\n")[:-1]]
