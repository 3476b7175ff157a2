"""The parser under attack: any text in any format, odd JSON, and time linear in the length."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.formats import (
    BY_NAME,
    CALL_FORMATS,
    REASONING_BY_NAME,
    CallFormat,
    ChannelFormat,
    LinesCall,
)
from server.text.parsers.syntax import State, Syntax, literals
from server.text.tools import Tool
from tests.support.parsing import parse, syntax_of
from tests.support.thorough import examples
from tests.support.written_calls import written

THINK = REASONING_BY_NAME["think"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = {name: Tool(name, SCHEMA, {}) for name in ("weather", "stock-price")}
CALLED = [("weather", {"city": "Rome", "days": 3}), ("weather", {"city": "Zürich"})]
LINES = CallFormat("lines", LinesCall(">\n"), open="<call ", close="</call>", separator="\n")
FRAGMENTS = (
    *"{}[](),:=;\"'\\\n\t <-01aé😀\ufdef",
    *("weather", "city", "days", "true", "null", "NaN", "1e999", "\\ud800", "{'a': 1}", "x" * 30),
    *('{"name": "weather", "arguments": ', '{"city": "Rome"}', '"name": ', '"arguments": '),
    *("weather(city=", "to=functions.weather", "functions.weather:0", '"tool_name": "weather"'),
)


@st.composite
def attacked(draw: st.DrawFn) -> tuple[Syntax, str, State]:
    """Return a syntax, a text of fragments of its format, and the state that it starts in."""
    format = draw(st.sampled_from([*CALL_FORMATS, LINES, None]))
    reasoning = THINK if draw(st.booleans()) and not isinstance(format, ChannelFormat) else None
    syntax = syntax_of(format, reasoning, tokens=draw(st.booleans()))
    marks = literals(format, reasoning)
    marks += [mark.strip() for mark in marks] + [mark.strip()[:-1] for mark in marks]
    calls = [written(format, CALLED), written(format, [("other", {})])] if format else []
    parts = draw(st.lists(st.sampled_from([*FRAGMENTS, *marks, *calls]), max_size=25))
    starts = [State.REASONING, State.CONTENT] if reasoning else [State.CONTENT]
    if isinstance(format, ChannelFormat):
        starts = [State.HEADER]
    return syntax, syntax.marks.encode("".join(parts)), draw(st.sampled_from(starts))


@settings(max_examples=examples(400), deadline=None)
@given(attack=attacked(), data=st.data())
def test_any_text_in_any_format_parses_the_same_in_any_pieces(attack, data) -> None:
    syntax, text, start = attack
    whole = parse(syntax, [text], TOOLS, start=start)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parse(syntax, pieces, TOOLS, start=start) == whole
    assert parse(syntax, list(text), TOOLS, start=start) == whole
    calls = "".join(name + arguments for name, arguments in whole.calls)
    (whole.content + whole.reasoning + calls).encode()  # no lone surrogates
    outcomes = [outcome for outcome in whole.outcomes if outcome != "malformed"]
    for (_, arguments), outcome in zip(whole.calls, outcomes, strict=True):
        if outcome == "valid":
            json.loads(arguments, parse_constant=pytest.fail)


@settings(max_examples=examples(400), deadline=None)
@given(attack=attacked(), data=st.data())
def test_cut_answer_in_any_format_is_a_beginning_of_the_whole(attack, data) -> None:
    syntax, text, start = attack
    at = data.draw(st.integers(0, len(text)))
    whole = parse(syntax, [text], TOOLS, start=start)
    cut = parse(syntax, [text[:at]], TOOLS, start=start, is_cut=True)
    assert parse(syntax, list(text[:at]), TOOLS, start=start, is_cut=True) == cut
    # Without tools, white space before a mark that only follows later is not held back at the end.
    assert whole.content.startswith(cut.content if syntax.format else cut.content.rstrip())
    assert whole.reasoning.startswith(cut.reasoning)
    assert len(cut.calls) <= len(whole.calls)
    for (name, arguments), (whole_name, whole_arguments) in zip(
        cut.calls, whole.calls, strict=False
    ):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)


@settings(max_examples=examples(300), deadline=None)
@given(attack=attacked())
def test_answer_without_calls_loses_no_text(attack) -> None:
    syntax, text, start = attack
    answer = parse(syntax, [text], TOOLS, start=start)
    if answer.calls or answer.outcomes or answer.reasoning or start is not State.CONTENT:
        return
    if syntax.transitions[State.SECTION] or syntax.reasoning_open:
        return  # empty sections and empty reasoning are dropped
    assert answer.content == syntax.marks.shown(text)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ' + "[" * 5000,
        '<tool_call>{"name": ' + "1" * 5000 + "}</tool_call>",
        '<tool_call>{"id": ' + "1" * 5000 + ', "x": 1}</tool_call>',
        "<tool_call>{[1]: 2}</tool_call>",
        '<tool_call>{"name": ""}</tool_call>',
        "<tool_call>{3: 4}</tool_call>",
    ],
)
def test_what_is_no_name_or_key_is_content(text: str) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('"arguments": {"days": ' + "1" * 5000 + '}, "name": "now"', None),
        ('"name": "now", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}", None),
        ('"name": "now", "arguments": "\\ud800"', '"\\ud800"'),
        ('"name": "now", "arguments": {"a": 1}, "arguments": {"b": 2}', '{"a": 1}'),
        ('"name": "now", "arguments": {"a": 1}, "name": "then"', '{"a": 1}'),
        ('"name": "now", "arguments": {}, "arguments": "x"', "{}"),
    ],
    ids=lambda text: str(text)[-12:],
)
def test_odd_arguments_are_passed_on_once(call: str, arguments: str | None) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = f"<tool_call>{{{call}}}</tool_call>"
    for pieces in ([text], list(text)):
        ((name, passed),) = parse(syntax, pieces, TOOLS).calls
        assert name == "now"
        assert passed == (arguments or passed)


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", '"\\ud800"', "'\\ud800'", "[" * 5000, "-" * 5000 + "1", "{1, 2}",
     '"' * 999, "1" * 5000, "0x" + "f" * 9999, "(" * 300, "{'a': b'c'}", "\\"],
    ids=lambda value: value[:8],
)  # fmt: skip
def test_any_value_between_tags_gives_json(value: str) -> None:
    syntax = syntax_of(BY_NAME["qwen3_coder"], tokens=False)
    for key in ("city", "days", "other"):
        text = f"<function=weather><parameter={key}>{value}</parameter></function>"
        ((_, arguments),) = parse(syntax, [text], TOOLS).calls
        read = json.loads(arguments, parse_constant=pytest.fail, parse_int=str)
        assert list(read) == [key]
        assert arguments.encode().decode() == arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[weather(city=]"),
        ("pythonic", '[weather(city="Rome'),
        ("gemma4", "<|tool_call>call:weather{city:"),
        ("gemma4", "<|tool_call>call:weather{days:[1"),
    ],
)
def test_argument_without_an_end_leaves_a_beginning_of_json(name: str, text: str) -> None:
    syntax = syntax_of(BY_NAME[name], tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        ((_, arguments),) = answer.calls
        assert arguments in ('{"city": ', '{"days": ')
        assert answer.outcomes == ["invalid_arguments"]


def test_second_call_of_a_list_that_is_none_is_content() -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    first = '{"name": "weather", "arguments": {"city": "Rome"}}'
    text = f'<tool_call>[{first}, {{"name": 3}}]</tool_call>'
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert answer.calls == [("weather", '{"city": "Rome"}')]
        assert answer.content == ', {"name": 3}]</tool_call>'
        assert answer.outcomes == ["valid", "malformed"]


def test_section_without_calls_is_content() -> None:
    syntax = syntax_of(BY_NAME["kimi_k2"], tokens=False)
    text = "a <|tool_calls_section_begin|>nothing<|tool_calls_section_end|> b"
    for pieces in ([text], list(text)):
        assert parse(syntax, pieces, TOOLS).content == text


def test_name_that_does_not_end_is_content_and_a_call_after_it_is_read() -> None:
    syntax = syntax_of(BY_NAME["mistral"], tokens=False)
    call = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    text = "[TOOL_CALLS]" + "x" * 2000 + "[ARGS]{}"
    for pieces in ([text + call], list(text + call)):
        answer = parse(syntax, pieces, TOOLS)
        assert answer.content == text
        assert answer.calls == [("weather", '{"city": "Rome"}')]


def lengthy(name: str, size: int) -> str:
    """Return a text with a part of `size` characters."""
    hermes = '<tool_call>{"name": "weather", "arguments": {"'
    match name:
        case "white space":
            return " " * size + "x"
        case "beginnings of marks":
            return "<tool" * (size // 5)
        case "text":
            return f'{hermes}city": "' + "a" * size
        case "number":
            return f'{hermes}days": ' + "1" * size
        case "arguments before the name":
            return '<tool_call>{"arguments": {"city": "' + "a" * size + '"}, "name": "weather"}'
        case "key":
            return '<tool_call>{"' + "a" * size
    return written(BY_NAME["hermes"], CALLED) * (size // 150)


@pytest.mark.variants(6)
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    "name",
    ["white space", "beginnings of marks", "text", "number", "arguments before the name", "key",
     "calls"],
)  # fmt: skip
def test_time_is_linear_in_the_length(name: str, is_whole: bool) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    check_linear(syntax, lambda size: lengthy(name, size), is_whole=is_whole)


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("format", "opening"),
    [
        ("pythonic", '[weather(city="'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>'),
        ("qwen3_coder", "<function=weather><parameter=other>"),
        ("mistral", "[TOOL_CALLS]"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("llama3_json", ""),
    ],
)
def test_time_of_other_notations_is_linear_in_the_length(format: str, opening: str) -> None:
    syntax = syntax_of(BY_NAME[format], tokens=False)
    filler = "a" if opening else " "
    check_linear(syntax, lambda size: opening + filler * size, is_whole=False)
    if opening:
        check_linear(syntax, lambda size: opening * (size // len(opening)), is_whole=True)


def test_python_value_of_quotes_takes_linear_time() -> None:
    check_linear(
        syntax_of(BY_NAME["qwen3_coder"], tokens=False),
        lambda size: (
            f"<function=weather><parameter=o>{'a' + chr(92) + chr(34)}"
            + '\\"' * (size // 8)
            + "</parameter></function>"
        ),
        is_whole=True,
    )


def check_linear(syntax: Syntax, text_of: Callable[[int], str], *, is_whole: bool) -> None:
    """Check that ten times the text takes less than forty times as long; a square takes 100."""

    def seconds(size: int) -> float:
        text = text_of(size)
        pieces = [text] if is_whole else list(text)
        start = time.process_time()
        parse(syntax, pieces, TOOLS)
        return time.process_time() - start

    small = min(seconds(10_000) for _ in range(3))
    large = seconds(100_000)
    assert large < max(40 * small, 0.1), (small, large)
