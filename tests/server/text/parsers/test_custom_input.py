"""The input of custom tools from the arguments that models write, whole and in pieces."""

from __future__ import annotations

import json

import pytest

from server.text.parsers.custom_input import InputReader
from server.text.parsers.formats import BY_NAME
from server.text.tools import InputFormat, custom_tool
from tests.support.parsing import State, Stream, syntax_of

INPUT = 'a "b"\\\n\t\N{PILE OF POO}é\x01</parameter>'


def read(text: str, size: int) -> str:
    reader = InputReader()
    parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join([*parts, reader.end()])


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_input_is_the_text_of_the_argument(size: int, ensure_ascii: bool) -> None:
    assert read(json.dumps({"input": INPUT}, ensure_ascii=ensure_ascii), size) == INPUT
    assert read(json.dumps({"input": INPUT, "other": 1}, ensure_ascii=ensure_ascii), size) == INPUT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"patch": "x\\n"}', "x\n"),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"a": "1", "b": "x"}', '{"a": "1", "b": "x"}'),
        ('"x"', "x"),
        ("x = {", "x = {"),
        ("{}", "{}"),
        (r'{"input": "\d\ud83d"}', "\\d\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "\ude00\ud83d\ud83d\ude00"}', "\N{REPLACEMENT CHARACTER}" * 2 + "😀"),
        (r'{"input": "\ud83dx"', "\N{REPLACEMENT CHARACTER}x"),
        ('{"input": "x', "x"),
    ],
)
def test_input_of_other_arguments_is_what_they_say(text: str, expected: str) -> None:
    assert read(text, 1) == read(text, len(text)) == expected


def test_input_streams_while_the_call_is_written() -> None:
    tools = {"f": custom_tool("f", None, InputFormat())}
    stream = Stream(syntax_of(BY_NAME["hermes"], tokens=True), tools, State.CONTENT)
    mark = stream.parser._syntax.marks.encode("<tool_call>")
    stream.push(f'{mark}\n{{"name": "f", "arguments": {{"input": "one\\n')
    assert stream.copy().end(is_cut=True).calls == [("f", "one\n")]
    stream.push('two"}}')
    answer = stream.end()
    assert (answer.calls, answer.outcomes) == ([("f", "one\ntwo")], ["valid"])
