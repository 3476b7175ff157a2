"""The parser on calls of every format: splits, cuts, and malformed calls."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.parsers.formats import (
    BY_NAME,
    CALL_FORMATS,
    REASONING_BY_NAME,
    ChannelFormat,
    GemmaCall,
    PythonCall,
    TaggedCall,
)
from server.text.parsers.syntax import State
from server.text.tools import Tool
from tests.support.parsing import Answer, check_cuts, parse, syntax_of
from tests.support.thorough import examples
from tests.support.written_calls import written

THINK = REASONING_BY_NAME["think"]
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"city": TEXT, "days": {"type": "integer"}, "more": {"type": "object"}},
    "required": ["city"],
}
TOOLS = {name: Tool(name, SCHEMA, {}) for name in ("weather", "stock-price")}
CALLED = [
    ("weather", {"city": 'Ro"me\n{', "days": -3, "more": {"a": [1.5, True, None], "b": {}}}),
    ("weather", {"city": "Zürich"}),
]
BARE = [format for format in CALL_FORMATS if format.is_bare]
MARKED = [format for format in CALL_FORMATS if not format.is_bare]


def called_in(answer: Answer) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda format: format.name)
@pytest.mark.variants(8)
def test_calls_of_every_format_survive_splits_and_cuts(format, tokens) -> None:
    syntax = syntax_of(format, tokens=tokens)
    text = written(format, CALLED)
    answer = parse(syntax, [syntax.marks.encode(text)], TOOLS)
    assert called_in(answer) == CALLED
    assert answer.content == ""
    assert answer.outcomes == ["valid", "valid"]
    check_cuts(syntax, text, TOOLS)


@pytest.mark.variants(14)
@pytest.mark.parametrize("format", MARKED, ids=lambda format: format.name)
def test_reasoning_and_text_before_calls_survive_splits_and_cuts(format) -> None:
    if isinstance(format, ChannelFormat):
        pytest.skip("its reasoning is a message of its own: see the test of channels")
    syntax = syntax_of(format, THINK, tokens=True)
    text = f"<think>\nShould I?\n</think>\n\nI look < it up. {written(format, CALLED)}"
    answer = parse(syntax, [syntax.marks.encode(text)], TOOLS)
    assert (answer.reasoning, answer.content) == ("Should I?", "I look < it up.")
    assert called_in(answer) == CALLED
    check_cuts(syntax, text, TOOLS)


def test_channels_are_reasoning_content_and_calls() -> None:
    format = BY_NAME["harmony"]
    syntax = syntax_of(format, tokens=True)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        ' <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    )
    answer = parse(syntax, [syntax.marks.encode(text)], TOOLS, start=State.HEADER)
    assert answer[:3] == ("One moment.", "Hm.", [("weather", '{"city": "Rome"}')])
    check_cuts(syntax, text, TOOLS, start=State.HEADER)


def test_prompt_that_opens_reasoning_starts_in_it() -> None:
    syntax = syntax_of(BY_NAME["hermes"], THINK, tokens=True)
    marked = syntax.marks.encode("\nHm.\n</think>\n\nYes.")
    assert parse(syntax, [marked], TOOLS, start=State.REASONING)[:2] == ("Yes.", "Hm.")


def test_text_like_a_token_is_content() -> None:
    """A model that explains its format writes the mark as ordinary text."""
    syntax = syntax_of(BY_NAME["hermes"], tokens=True)
    text = "Write <tool_call> before a call."
    assert parse(syntax, list(text), TOOLS).content == text


@pytest.mark.parametrize("format", BARE, ids=lambda format: format.name)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        "[1] is a citation",
        "{not json",
        "[]",
        '["a", "b"]',
        "x {",
        "{}",
    ],
)
def test_format_without_marks_leaves_other_json_as_content(format, text) -> None:
    syntax = syntax_of(format, tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>"),
        ('<tool_call>\n{"name": 3}', '<tool_call>\n{"name": 3}'),
        ("<tool_call>", "<tool_call>"),
        ("Yes. <tool_call>\n{", "Yes. <tool_call>\n{"),
    ],
)
def test_what_is_no_call_is_content_and_counted(text, content) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        assert (answer.content, answer.calls) == (content, [])
        assert answer.outcomes == ["malformed"]


@pytest.mark.parametrize("arguments", ["{'city': 3}", '{"city": "Rome"]', "{bad}", '{"city": 01}'])
def test_malformed_arguments_are_passed_on_and_counted(arguments) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}\n</tool_call> Done.'
    for pieces in ([text], list(text)):
        answer = parse(syntax, pieces, TOOLS)
        ((name, passed),) = answer.calls
        assert name == "weather"
        assert passed.replace("}", "").startswith(arguments.replace("}", "")[:6])
        assert answer.outcomes == ["invalid_arguments"]
        assert answer.content.strip() == "Done."


def test_answer_that_ends_within_a_call_keeps_what_it_has() -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    answer = parse(syntax, [text], TOOLS)
    assert answer.calls == [("weather", '{"city": "Ro')]
    assert answer.outcomes == ["invalid_arguments"]
    assert parse(syntax, [text], TOOLS, is_cut=True).outcomes == []


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"city": "Rome"}, "name": "weather"}', '{"city": "Rome"}'),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', '{"city": "Rome"}'),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}', '{"city": "Rome"}'),
        ('{"id": "x", "name": "weather", "arguments": {"city": "a\nb"}}', '{"city": "a\\nb"}'),
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "arguments": null}', "{}"),
    ],
)
def test_variants_of_json_calls_are_read(call, arguments) -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = f"<tool_call>\n{call}\n</tool_call>"
    for pieces in ([text], list(text)):
        assert parse(syntax, pieces, TOOLS).calls == [("weather", arguments)]


def test_unknown_function_is_a_call_and_counted() -> None:
    syntax = syntax_of(BY_NAME["hermes"], tokens=False)
    text = written(BY_NAME["hermes"], [("other", {})])
    assert parse(syntax, [text], TOOLS).outcomes == ["unknown_tool"]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("3", 3),
        ("three", "three"),
        ("True", True),
        ("[1, 2]", [1, 2]),
        ("{'a': None}", {"a": None}),
    ],
)
def test_value_between_tags_follows_the_schema(value, read) -> None:
    format = BY_NAME["qwen3_coder"]
    syntax = syntax_of(format, tokens=True)
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n3\n</parameter>\n"
        f"<parameter=days>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    answer = parse(syntax, [syntax.marks.encode(text)], TOOLS)
    assert called_in(answer) == [("weather", {"city": "3", "days": read})]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
PLAIN_KEY = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ANY_TOOL = {"f": Tool("f", {"type": "object"}, {})}


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), format=st.sampled_from(CALL_FORMATS))
def test_any_arguments_and_any_pieces_give_the_call(data, format) -> None:
    """Formats without quotes cannot hold every text: there, words stand for texts."""
    body = getattr(format, "body", None)
    words = st.from_regex(r"[a-zA-Zé ]{1,12}", fullmatch=True).filter(lambda w: w == w.strip())
    if isinstance(body, TaggedCall | GemmaCall | PythonCall):
        names = ("true", "false", "null", "none", "nan", "infinity")
        values = words.filter(lambda word: word.lower() not in names) | st.integers()
        arguments = data.draw(st.dictionaries(PLAIN_KEY, values, max_size=4))
    else:
        arguments = data.draw(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
    syntax = syntax_of(format, tokens=data.draw(st.booleans()))
    marked = syntax.marks.encode(written(format, [("f", arguments)]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(marked)), max_size=6)))
    places = [0, *cuts, len(marked)]
    pieces = [marked[a:b] for a, b in itertools.pairwise(places)]
    assert called_in(parse(syntax, pieces, ANY_TOOL)) == [("f", arguments)]


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "weather"', "}", "\n",
             ', "arguments": {', "x", " ", "<", "<function=weather>", "<parameter=city>", "]", "["]
        )
    ).map("".join),
    name=st.sampled_from(["hermes", "qwen3_coder", "glm", "llama3_json", "pythonic", "mistral"]),
    is_cut=st.booleans(),
)  # fmt: skip
def test_any_text_parses_the_same_in_one_piece_and_in_many(text, name, is_cut) -> None:
    syntax = syntax_of(BY_NAME[name], THINK, tokens=False)
    whole = parse(syntax, [text], TOOLS, is_cut=is_cut)
    assert parse(syntax, list(text), TOOLS, is_cut=is_cut) == whole
