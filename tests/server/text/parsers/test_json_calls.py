"""Calls that are JSON: several in one block, without marks, and answers that only look like one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.text.deltas import ToolCallDelta
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.formats import BY_NAME
from server.text.tools import Tool
from tests.support.parsing import check_cuts, parse, syntax_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {name: Tool(name, SCHEMA, {}) for name in ("weather", "now")}
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "now", "arguments": {}}'
BOTH = [("weather", '{"city": "Rome"}'), ("now", "{}")]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>\n{ROME}\n{NOW}\n</tool_call>"),
        ("hermes", f"<tool_call>{ROME}{NOW}</tool_call>"),
        ("hermes", f"<tool_call>\n{ROME}, {NOW}\n</tool_call>"),
        ("hermes", f"<tool_call>\n{ROME};\n{NOW}\n</tool_call>"),
        ("hermes", f"<tool_call>\n[{ROME}, {NOW}]\n</tool_call>"),
        ("hermes", f"<tool_call>[{ROME}]\n[{NOW}]</tool_call>"),
        ("hermes", f"<tool_call>{ROME}}}\n{NOW}}}</tool_call>"),
        ("hermes", f"<tool_call>\n{ROME}\n<tool_call>\n{NOW}\n</tool_call>"),
        ("hermes", f"<tool_call>\n{ROME}\n{NOW}"),
        ("hermes", f"<tool_call>\n{ROME}\n{NOW}\n</tool_call>\n"),
        ("nemotron", f"<TOOLCALL>[{ROME}][{NOW}]</TOOLCALL>"),
        ("lfm2", '<|tool_call_start|>[weather(city="Rome")]\n[now()]<|tool_call_end|>'),
    ],
)
def test_every_call_of_one_block_is_read(name: str, text: str, tokens: bool) -> None:
    syntax = syntax_of(BY_NAME[name], tokens=tokens)
    for pieces in ([syntax.marks.encode(text)], list(syntax.marks.encode(text))):
        answer = parse(syntax, pieces, TOOLS)
        assert (answer.content, answer.calls) == ("", BOTH)
        assert answer.outcomes == ["valid", "valid"]
    check_cuts(syntax, text, TOOLS)


def test_other_text_after_a_call_is_dropped_up_to_its_mark() -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = f"<tool_call>{ROME} as {{you}} asked</tool_call> Done."
    for pieces in ([text], list(text)):
        assert parse(syntax, pieces, TOOLS)[:3:2] == ("Done.", BOTH[:1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>{ROME}\n{NOW}</tool_call>"),
        ("nemotron", f"<TOOLCALL>[{ROME}, {NOW}]</TOOLCALL>"),
        ("llama3_json", f"{ROME}; {NOW} Done."),
        ("mistral_list", f"[TOOL_CALLS][{ROME}, {NOW}]"),
        ("pythonic", '[weather(city="Rome"), now()]'),
    ],
)
def test_nothing_is_read_after_the_last_call_that_a_request_allows(name: str, text: str) -> None:
    """Several calls may come in one token."""
    syntax = syntax_of(BY_NAME[name], tokens=False)
    parser = AnswerParser(syntax, TOOLS, most_calls=1)
    parser.push(text)
    parser.push(text)
    parser.flush(is_cut=False)
    deltas = parser.take()
    assert [type(delta) for delta in deltas] == [ToolCallDelta]
    assert parser.outcomes == ["valid"]


PARAMETERS = '"parameters": {"city": "Rome"}'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f'{{"name": "weather", {PARAMETERS}}}', BOTH[:1], ""),
        (f'{{"type": "function", "name": "weather", {PARAMETERS}}}', BOTH[:1], ""),
        (f'{{"type": "function", "function": "weather", {PARAMETERS}}}', BOTH[:1], ""),
        (f'{{{PARAMETERS}, "name": "weather"}}', BOTH[:1], ""),
        ('{"name": "weather", "parameters": "{\\"city\\": \\"Rome\\"}"}', BOTH[:1], ""),
        ('{"name": "now"}', BOTH[1:], ""),
        ('{"name": "now", "parameters": null}', BOTH[1:], ""),
        (f'{{"name": "weather", {PARAMETERS}}};\n', BOTH[:1], ""),
        (f'{{"name": "weather", {PARAMETERS}}}\nDone.', BOTH[:1], "Done."),
        ('{"name": "weather", "age": 3}', [], None),
        ('{"name": "weather", "parameters": "metric"}', [], None),
        ('{"parameters": 3, "name": "weather"}', [], None),
        (f'{{"name": "rain", {PARAMETERS}}}', [], None),
        (f'Well. {{"name": "weather", {PARAMETERS}}}', [], None),
        ('<|python_tag|>print("x")', [], None),
        ("Write <|python_tag|> first.", [], None),
    ],
)
def test_answer_without_marks_is_a_call_if_it_names_a_tool(
    text: str, calls: list[Any], content: str | None
) -> None:
    syntax = syntax_of(BY_NAME["llama3_json"], tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert answer.calls == calls
        assert answer.content == (text if content is None else content)
        assert "malformed" not in answer.outcomes
    check_cuts(syntax, text, TOOLS)


@pytest.mark.parametrize("special", [True, False])
def test_token_before_calls_without_marks_is_dropped(special: bool) -> None:
    syntax = syntax_of(BY_NAME["llama3_json"], tokens=True)
    parser = AnswerParser(syntax, TOOLS, shows_special=not special)
    parser.push(syntax.marks.encode(f"<|python_tag|>{ROME}"))
    parser.flush(is_cut=False)
    (delta,) = parser.take()
    assert isinstance(delta, ToolCallDelta)
    assert json.loads(delta.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[weather(city="Rome"), now()]', BOTH),
        ('[weather(city="Rome")]; [now()]', BOTH),
        ("[weather (sunny), x]", []),
        ("[weather(", []),
        ("[rain()]", []),
    ],
)
def test_python_call_begins_with_its_first_argument(text: str, calls: list[Any]) -> None:
    syntax = syntax_of(BY_NAME["pythonic"], tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert (answer.calls, answer.content) == (calls, "" if calls else text)
    check_cuts(syntax, text, TOOLS)
