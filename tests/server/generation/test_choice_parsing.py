"""Choice with a parser: stop strings, special tokens and characters that look like marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.outputs import TokenOutput
from server.generation.choice import Choice
from server.generation.events import Finish, TextDelta
from server.text.answers import Parsing
from server.text.deltas import ReasoningDelta, ToolCallDelta
from server.text.load_tokenizer import load_tokenizer
from server.text.marks import Marks
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.formats import CallFormat, JsonCall, Reasoning
from server.text.parsers.syntax import make_syntax
from server.text.tokenizer import Tokenizer
from server.text.tools import MAX_CALLS, Tool
from tests.server.conftest import BOS, EOS
from tests.support.prepared import prepared_request

CALLS = CallFormat("test", JsonCall(), open="<call>", close="</call>")
CALL = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def parsed(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    special: frozenset[int] = frozenset(),
    **fields: Any,
) -> dict[str, Any]:
    """Return the joined parts of an answer. The token <s> closes its reasoning."""
    syntax = make_syntax(CALLS, Reasoning("<think>", "<s>"), Marks({"<s>": BOS}, special))
    tools = {"weather": Tool("weather", {}, {})}
    parsing = Parsing(
        syntax.marks,
        lambda shown: AnswerParser(syntax, tools, shows_special=shown, most_calls=MAX_CALLS),
    )
    request = dataclasses.replace(prepared_request([64], **fields), parsing=parsing)
    choice = Choice(tokenizer, request, 0)
    found: dict[str, Any] = {"content": "", "reasoning": "", "arguments": "", "finish": None}
    for token in ids:
        ended = choice.add(TokenOutput(1, token, "stop" if token == EOS else None))
        for event in choice.take().events:
            match event:
                case TextDelta():
                    found["content"] += event.text
                case ReasoningDelta():
                    found["reasoning"] += event.text
                case ToolCallDelta():
                    found["arguments"] += event.arguments
                case Finish():
                    found["finish"] = event
        if ended:
            break
    return found


Encode = Callable[[str], list[int]]


def test_stop_string_within_a_call_cuts_it(tokenizer: Tokenizer, encode: Encode) -> None:
    answer = parsed(tokenizer, [*encode(CALL), EOS], stop="ome")
    assert answer["arguments"] == '{"city": "R'
    assert answer["finish"] == Finish("stop", "ome")


@pytest.mark.parametrize("stop", ['{"', "name", "weather", "arg"])
def test_stop_string_before_the_arguments_leaves_no_markup(
    tokenizer: Tokenizer, encode: Encode, stop: str
) -> None:
    answer = parsed(tokenizer, [*encode(f"Well. {CALL}"), EOS], stop=stop)
    assert (answer["content"], answer["arguments"]) == ("Well.", "")
    assert answer["finish"] == Finish("stop", stop)


def test_stop_string_after_a_call_leaves_it(tokenizer: Tokenizer, encode: Encode) -> None:
    answer = parsed(tokenizer, [*encode(f"{CALL} END more"), EOS], stop="END")
    assert answer["arguments"] == '{"city": "Rome"}'
    assert answer["finish"] == Finish("tool_calls", "END")


def test_stop_string_in_reasoning_ends_the_answer(tokenizer: Tokenizer, encode: Encode) -> None:
    answer = parsed(tokenizer, [*encode("<think>Well, so"), EOS], stop=", ")
    assert (answer["reasoning"], answer["content"]) == ("Well", "")
    assert answer["finish"] == Finish("stop", ", ")


def test_stop_string_may_be_a_token_that_is_a_mark(tokenizer: Tokenizer, encode: Encode) -> None:
    ids = [*encode("<think>Well"), BOS, *encode("Yes"), EOS]
    answer = parsed(tokenizer, ids, stop="l<s>")
    assert (answer["reasoning"], answer["content"]) == ("Wel", "")
    assert answer["finish"] == Finish("stop", "l<s>")


@pytest.mark.parametrize("skip", [True, False])
def test_special_token_is_part_of_the_text_only_if_it_is_shown(
    tokenizer: Tokenizer, encode: Encode, skip: bool
) -> None:
    ids = [*encode("a"), BOS, *encode("b"), EOS]
    fields = {"special": frozenset({BOS}), "skip_special_tokens": skip}
    assert parsed(tokenizer, ids, **fields)["content"] == ("ab" if skip else "a<s>b")
    stopped = parsed(tokenizer, ids, stop="<s>", **fields)
    assert stopped["content"] == ("ab" if skip else "a")
    assert stopped["finish"].stop == (None if skip else "<s>")


def test_character_that_looks_like_a_mark_is_none(tokenizer: Tokenizer, encode: Encode) -> None:
    ids = [*encode("<think>a\ufdd0b\ufdd1"), EOS]
    assert parsed(tokenizer, ids)["reasoning"] == "a\ufffdb\ufffd"
    assert parsed(tokenizer, [*ids[:-1], EOS], stop="x")["content"] == ""
