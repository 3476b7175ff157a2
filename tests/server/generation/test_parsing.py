"""The parsers of a request know the special tokens of the vocabulary, except those that end it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.api.openai.test_tools import WEATHER, engine_of, streamed
from tests.server.conftest import BOS, EOS, encode, model
from tests.support.rig import serving

__all__ = ["encode", "model"]

CALL = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'


async def test_special_token_in_an_argument_is_its_text_and_hidden_in_content(
    model: Path, encode
) -> None:
    """No format has the token: models write it when they explain or edit prompts."""
    before, after = CALL.format("a@b").split("@")
    ids = [*encode("One"), BOS, *encode(" moment."), *encode(before), BOS, *encode(after), EOS]
    async with serving(engine_of(lambda request: ids), model) as served:
        whole = (await served.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        stream = (await streamed(served, tools=[WEATHER]))["message"]
        shown = (await served.chat(tools=[WEATHER], skip_special_tokens=False)).json()
    (call,) = whole["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "a<s>b"}
    assert stream["tool_calls"] == [call["function"]]
    assert whole["content"] == stream["content"] == "One moment."
    assert shown["choices"][0]["message"]["content"] == "One<s> moment."


@pytest.mark.parametrize("include", [True, False])
async def test_end_token_within_a_call_is_no_part_of_it(model: Path, encode, include) -> None:
    before, _ = CALL.format("a@b").split("@")
    ids = [*encode(before), EOS]
    async with serving(engine_of(lambda request: ids), model) as served:
        answer = await served.chat(tools=[WEATHER], include_stop_str_in_output=include)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "a'
