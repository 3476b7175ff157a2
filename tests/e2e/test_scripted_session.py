"""The scripted server of the tests of agents: its turns, and that grammars hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.process import Process
from tests.support.scripted_serve import MODEL, call, serving_script

EDIT = {"path": "/a b/ü.py", "old": 'x = "1"\n', "new": "x = 2\n\ty = '</tool_call>'\n"}
QUESTION = [{"role": "user", "content": "Correct it."}]


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


TOOLS = [tool("read", "path"), tool("edit", *EDIT)]


def answer(server: Process, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 400, **more}
    response = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, (response.text, server.log)
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def test_scripted_turns_are_written_one_after_each_result(tmp_path: Path) -> None:
    turns = ["I read it.\n" + call("read", path="/a"), call("edit", **EDIT), call("edit", **EDIT)]
    messages = list(QUESTION)
    with serving_script(tmp_path, [*turns, "Done."], ["A title", "Another title"]) as server:
        assert answer(server, messages)["content"] == "A title"
        called = []
        for choice in ("auto", "auto", "required"):
            message = answer(server, messages, tools=TOOLS, tool_choice=choice)
            [one] = message["tool_calls"]
            called.append((one["function"]["name"], json.loads(one["function"]["arguments"])))
            result = {"role": "tool", "tool_call_id": one["id"], "content": "ok"}
            messages += [message, result]
        assert answer(server, messages, tools=TOOLS)["content"] == "Done."
        messages.append({"role": "user", "content": "And now?"})
        assert answer(server, messages)["content"] == "Another title"
    assert called == [("read", {"path": "/a"}), ("edit", EDIT), ("edit", EDIT)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["Prose.", call("write", path="/a"), call("read", file="/a")])
def test_scripted_turn_against_the_grammar_is_an_error(tmp_path: Path, turn: str) -> None:
    body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    with serving_script(tmp_path, [turn]) as server:
        response = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 500, response.text
        assert "The grammar allows nothing that continues" in server.log
