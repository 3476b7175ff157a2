"""Tokens inside arguments, reasoning and content: their text, never the characters for them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from server.text.deltas import ToolCallDelta
from server.text.marks import CHARACTERS, Marks, without_marks
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.formats import (
    BY_NAME,
    CALL_FORMATS,
    REASONING_BY_NAME,
    AnyCallFormat,
    CallFormat,
    GemmaCall,
    TaggedCall,
)
from server.text.parsers.syntax import Syntax, literals, make_syntax
from server.text.tools import Tool
from tests.support.parsing import parse
from tests.support.written_calls import written

THINK = REASONING_BY_NAME["think"]
TOOLS = {"f": Tool("f", {"type": "object", "properties": {"s": {"type": "string"}}}, {})}
# Tokens of a vocabulary that no format has; one needs escapes in JSON and in Python.
OTHERS = {"<|im_start|>": 900, "<|'\"\\|>": 901, "<|reserved_7|>": 902}
PLACE = "@@"


def syntax_of(format: AnyCallFormat | None) -> Syntax:
    """Return a syntax whose marks are all tokens, special ones, with those of OTHERS."""
    texts = [text.strip() for text in literals(format, THINK)]
    tokens = {text: index for index, text in enumerate(dict.fromkeys(texts)) if len(text) > 2}
    special = [*tokens.values(), *OTHERS.values()]
    return make_syntax(format, THINK, Marks(tokens, special, OTHERS))


def tokens_in_a_text(format: AnyCallFormat, syntax: Syntax) -> Iterator[str]:
    """Yield the tokens that may stand in a text of a call: they do not end it."""
    ends = set()
    if isinstance(format, CallFormat) and isinstance(format.body, TaggedCall):
        ends.add(format.body.value_close.strip())
    if isinstance(format, CallFormat) and isinstance(format.body, GemmaCall):
        ends.add(format.body.quote)
    yield from (text for text in [*syntax.marks.by_text, *OTHERS] if text not in ends)


@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda format: format.name)
def test_token_in_an_argument_is_its_text(format) -> None:
    syntax = syntax_of(format)
    call = syntax.marks.encode(written(format, [("f", {"s": f"put it in {PLACE} at the end"})]))
    for token in tokens_in_a_text(format, syntax):
        mark = next(m for m in CHARACTERS if syntax.marks.text(m) == token)
        marked = call.replace(PLACE, mark)
        for pieces in ([marked], list(marked)):
            ((_, arguments),) = parse(syntax, pieces, TOOLS).calls
            assert json.loads(arguments) == {"s": f"put it in {token} at the end"}


@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda format: format.name)
def test_no_delta_of_a_cut_call_has_a_mark(format) -> None:
    syntax = syntax_of(format)
    call = syntax.marks.encode(written(format, [("f", {"s": f"a {PLACE}", "t": [PLACE, 1]})]))
    call = call.replace(PLACE, syntax.marks.by_id[900])
    for end in range(len(call) + 1):
        for is_cut in (True, False):
            parser = AnswerParser(syntax, TOOLS)
            parser.push(call[:end])
            parser.flush(is_cut=is_cut)
            for delta in parser.take():
                text = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
                assert without_marks(text) == text


@pytest.mark.parametrize(
    "format", [f for f in CALL_FORMATS if isinstance(f, CallFormat)], ids=lambda format: format.name
)
def test_other_token_in_reasoning_and_content_is_shown_only_if_special_ones_are(format) -> None:
    syntax = syntax_of(format)
    other = syntax.marks.by_id[900]
    marked = syntax.marks.encode(f"<think>\nA{PLACE}B\n</think>\n\nC{PLACE}D").replace(PLACE, other)
    hidden = parse(syntax, list(marked), TOOLS)
    assert (hidden.reasoning, hidden.content) == ("AB", "CD")
    parser = AnswerParser(syntax, TOOLS, shows_special=True)
    parser.push(marked)
    parser.flush(is_cut=False)
    texts = [delta.text for delta in parser.take() if not isinstance(delta, ToolCallDelta)]
    assert texts == ["A<|im_start|>B", "C<|im_start|>D"]


def test_name_with_a_token_has_its_text() -> None:
    syntax = syntax_of(BY_NAME["hermes"])
    mark = syntax.marks.by_text["</tool_call>"]
    call = syntax.marks.encode('<tool_call>\n{"name": "a@@", "arguments": {"@@": 1}}\n</tool_call>')
    answer = parse(syntax, [call.replace(PLACE, mark)], TOOLS)
    assert answer.calls == [("a</tool_call>", '{"</tool_call>": 1}')]


def test_tokens_of_the_format_come_before_others_and_numbered_ones_last() -> None:
    others = {f"<|reserved_{index}|>": index for index in range(100)} | {"<|im_start|>": 200}
    marks = Marks({"<tool_call>": 300}, (), others)
    assert {200, 300} <= marks.by_id.keys()
    assert len(marks.by_id) == len(CHARACTERS)
    assert len(set(marks.by_id.values())) == len(CHARACTERS)
    assert marks.encode("<|im_start|>") == "<|im_start|>"  # no part of the format
    assert marks.encode_shown("<|im_start|>", special=True) == marks.by_id[200]
