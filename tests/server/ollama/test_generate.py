"""POST /api/generate: prompts by the template, raw ones, and gaps before a suffix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import BOS
from tests.server.ollama.conftest import ask, lines_of
from tests.server.ollama.shapes import GENERATE_END, GENERATE_PART, check_shape
from tests.support.rig import Served

PATH = "/api/generate"


def prompt_of(served: Served) -> str:
    found: str = served.app.state.penstock.tokenizer.decode(
        served.engine.requests[-1].prompt, skip_special_tokens=False
    )
    return found


async def test_generate_has_the_documented_shapes_in_both_forms(hermes: Served) -> None:
    lines = lines_of(await ask(hermes, PATH, prompt="Hi", system="Be short."))
    whole = (await ask(hermes, PATH, prompt="Hi", system="Be short.", stream=False)).json()
    assert prompt_of(hermes) == "<s><system>Be short.<user>Hi<assistant>"
    for line in lines[:-1]:
        check_shape(line, GENERATE_PART)
    check_shape(lines[-1], GENERATE_END)
    check_shape(whole, GENERATE_END)
    assert "".join(line["response"] for line in lines) == whole["response"] == "Yes."
    assert "".join(line.get("thinking", "") for line in lines) == whole["thinking"] == "Hm."


@pytest.mark.parametrize("fields", [{"raw": True}, {"template": "{{ .Prompt }}"}])
async def test_raw_prompt_is_continued_as_it_is(served: Served, fields: dict[str, Any]) -> None:
    lines = lines_of(await ask(served, PATH, prompt="Hi", **fields))
    assert prompt_of(served) == "<s>Hi"
    assert served.engine.requests[0].prompt[0] == BOS
    assert "".join(line["response"] for line in lines) == "Hello wörld!"
    assert lines[-1]["eval_count"] == 14


async def test_generate_without_a_prompt_says_that_the_model_is_loaded(served: Served) -> None:
    [line] = lines_of(await ask(served, PATH, prompt="", keep_alive="5m"))
    assert (line["response"], line["done_reason"]) == ("", "load")
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"template": "{{ .System }}{{ .Prompt }}"}, "template"),
        ({"raw": True, "system": "a"}, "system"),
        ({"raw": True, "think": False, "images": ["aa"]}, "images"),
        ({"context": [1, 2]}, "context"),
        ({"suffix": "b"}, "suffix"),  # the tokenizer has no tokens for it
        ({"width": 512}, "width"),
        ({"prompt": "a" * 600}, "512 tokens"),
        ({"prompt": "a" * 600, "raw": True}, "512 tokens"),
    ],
)
async def test_generate_refuses_by_name(served: Served, fields: dict[str, Any], name: str) -> None:
    response = await ask(served, PATH, **{"prompt": "Hi", **fields})
    assert response.status_code == 400
    assert name in response.json()["error"]
    assert not served.engine.requests
