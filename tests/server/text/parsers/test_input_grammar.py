"""Calls of custom tools whose input a grammar holds: in every format, as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher

from server.text.marks import Marks
from server.text.parsers.call_grammar import call_grammar
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import (
    BY_NAME,
    CALL_FORMATS,
    AnyCallFormat,
    CallFormat,
    ChannelFormat,
    LinesCall,
)
from server.text.parsers.input_grammar import check_lark, lark_of_regex
from server.text.parsers.syntax import State, make_syntax
from server.text.tools import InputFormat, Tool, ToolUse, custom_tool, function_tool
from tests.support.grammars import byte_tokenizer
from tests.support.parsing import Stream, syntax_of
from tests.support.written_calls import written

PATCH = """\
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF line+
line: "+" /(.*)/ LF -> added
%import common.LF
"""
INPUT = "*** Begin Patch\n*** Add File: a\"b\\.py\n+print('é\\n')\t</parameter>\n*** End Patch\n"
ANY = "start: /(.|\\n)+/"
TOOLS = (
    function_tool("now", None, None, strict=None),
    custom_tool("patch", "Change files.", InputFormat("lark", PATCH)),
    custom_tool("any", None, InputFormat("lark", ANY)),
    custom_tool("date", None, InputFormat("regex", r"^\d{4}-\d\d-\d\d/x$")),
)
LINES = CallFormat("lines", LinesCall(":"), open="<call>", close="</call>")
GIVEN = [
    ("patch", INPUT),
    ("patch", INPUT[:-1]),
    ("any", f'{INPUT}"}}]\n'),
    ("any", "\n x"),
    ("date", "2026-11-30/x"),
]


def grammar_of(
    format: AnyCallFormat, tools: Sequence[Tool], mode: str = "required", name: str | None = None
) -> str:
    """Return the grammar of answers, in which no mark is a token."""
    syntax, plain = make_syntax(format, None, Marks({})), make_syntax(None, None, Marks({}))
    answers = AnswerFormat(format, None, "table", True, syntax, plain)
    use = ToolUse(tools, mode, name)  # type: ignore[arg-type]
    return call_grammar(answers, use, State.CONTENT, {})


def allows(grammar: str, text: str) -> bool:
    source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    matcher = LLMatcher(byte_tokenizer(), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def head_of(format: AnyCallFormat, tool: Tool) -> str:
    """Return what an answer begins with that calls only this tool: the grammar's fixed texts."""
    start = grammar_of(format, [tool], name=tool.name).partition("\n")[0]
    call = re.search(r"call\d+: (.*)", grammar_of(format, [tool], name=tool.name))
    rule = call[1] if call else start.removeprefix("start: ")
    parts = re.findall(r'"(?:[^"\\]|\\.)*"|/\[0-9\]\{1,3\}/', rule)
    return "".join("7" if part[0] == "/" else json.loads(part) for part in parts)


FORMATS = [*CALL_FORMATS, LINES]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.variants(14)
def test_input_of_every_format_is_held_and_read_as_it_is(format: AnyCallFormat) -> None:
    tools = {tool.name: tool for tool in TOOLS}
    grammars = {mode: grammar_of(format, TOOLS, mode) for mode in ("required", "auto")}
    for name, given in GIVEN:
        head = head_of(format, tools[name])
        for mode, grammar in grammars.items():
            assert allows(grammar, head + given), (mode, head)
            assert allows(grammar, written(format, [("now", {})])), mode
        for tokens in (False, True):
            syntax = syntax_of(format, tokens=tokens)
            whole, pieces = (Stream(syntax, tools, State.CONTENT) for _ in range(2))
            marked = syntax.marks.encode(head) + given
            whole.push(marked)
            for char in marked:
                pieces.push(char)
            answer = whole.end()
            assert (answer.calls, answer.content) == ([(name, given)], "")
            assert pieces.end() == answer


@pytest.mark.variants(12)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_input_that_does_not_match_is_not_allowed(format: AnyCallFormat) -> None:
    grammar = grammar_of(format, TOOLS)
    for tool, wrong in ((TOOLS[1], INPUT[:-9]), (TOOLS[3], "2026-1-30/x"), (TOOLS[3], "")):
        assert not allows(grammar, head_of(format, tool) + wrong)


def test_token_after_the_input_ends_it_and_the_call() -> None:
    for name in ("hermes", "glm", "gemma4", "deepseek_v3_1"):
        format = BY_NAME[name]
        syntax = syntax_of(format, tokens=True)
        tools = {tool.name: tool for tool in TOOLS}
        assert isinstance(format, CallFormat)
        (end,) = syntax.transitions[State.INPUT]
        stream = Stream(syntax, tools, State.CONTENT)
        stream.push(syntax.marks.encode(head_of(format, TOOLS[2])) + "x\n" + end)
        assert stream.end(is_cut=True).calls == [("any", "x\n")]
        assert stream.parser.outcomes == ["valid"]


def test_closing_tags_after_any_text_are_no_part_of_the_input() -> None:
    format = BY_NAME["qwen3_coder"]
    tools = {tool.name: tool for tool in TOOLS}
    syntax = make_syntax(format, None, Marks({"<tool_call>": 1, "</tool_call>": 2}))
    for closing in ("\n</parameter>\n</function>\n", ""):
        stream = Stream(syntax, tools, State.CONTENT)
        (end,) = stream.parser._syntax.transitions[State.INPUT]
        head = stream.parser._syntax.marks.encode(head_of(format, TOOLS[2]))
        for char in f"{head}a\n</parameter> b{closing}{end}":
            stream.push(char)
        assert stream.end().calls == [("any", "a\n</parameter> b")]


def test_answer_cut_within_an_input_leaves_the_call_open() -> None:
    tools = {tool.name: tool for tool in TOOLS}
    stream = Stream(syntax_of(BY_NAME["hermes"], tokens=True), tools, State.CONTENT)
    marks = stream.parser._syntax.marks
    stream.push(marks.encode(head_of(BY_NAME["hermes"], TOOLS[1])) + INPUT[:20])
    answer = stream.end(is_cut=True)
    assert (answer.calls, answer.outcomes) == ([("patch", INPUT[:20])], [])


@pytest.mark.parametrize(
    ("lark", "says"),
    [
        ("start: <|im_end|>", r"line 1: <\|im_end\|> is not supported"),
        ("start: a\na: @answer", "line 2: @answer is not supported"),
        ('start: "a" }\nevil: "b"', "line 1: a brace closes nothing"),
        ("start: /a{1/", None),
        ('start: ("a"){2', "a brace is not closed"),
        ('start: "a', "line 1: a text is not closed"),
        ("start: 'a'", None),
        ("start: /a", "line 1: a regular expression is not closed"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1: %llguidance is not supported"),
        ('start: "}" /}@/ // } <x>', None),
    ],
)
def test_check_lark_names_what_leaves_the_grammar(lark: str, says: str | None) -> None:
    if says is None:
        check_lark(lark)
        return
    with pytest.raises(ValueError, match=says):
        check_lark(lark)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a/b\\/c", "a/b/c", "a/b\\/c"),
        ("a\nb\\\nc", "a\nb\nc", "abc"),
        ("^(?:x|y)$", "y", "xy"),
        ("", "", "a"),
        ('"\\\\"', '"\\"', '"'),
    ],
)
def test_lark_of_regex_allows_what_matches_as_a_whole(pattern, matching, other) -> None:
    grammar = lark_of_regex(pattern) + "\n"
    assert allows(grammar, matching)
    assert not allows(grammar, other)


@pytest.mark.variants(12)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_functions_that_are_not_strict_are_free_next_to_a_held_input(format: AnyCallFormat) -> None:
    """An agent's other tools may have schemas that cannot be followed."""
    text = {"type": "string", "not": {"const": "y"}}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    loose = function_tool("loose", None, schema, strict=None)
    grammar = grammar_of(format, [loose, TOOLS[1]], "auto")
    assert allows(grammar, written(format, [("loose", {"a": "x"})]))
    strict = function_tool("loose", None, {"type": "object", "properties": {"a": {"enum": [1]}}},
                           strict=True)  # fmt: skip
    grammar = grammar_of(format, [strict, TOOLS[1]], "auto")
    assert allows(grammar, written(format, [("loose", {"a": 1})]))
    if not (isinstance(format, CallFormat) and format.is_bare):  # there it is a text
        assert not allows(grammar, written(format, [("loose", {"a": 2})]))


def test_refusal_names_the_tool() -> None:
    tool = custom_tool("patch", None, InputFormat("lark", "start: <x>"))
    with pytest.raises(ValueError, match="the grammar of the custom tool 'patch': line 1: <x>"):
        grammar_of(BY_NAME["hermes"], [tool])


def test_long_definition_is_refused() -> None:
    tool = custom_tool("f", None, InputFormat("regex", "a" * 70_000))
    with pytest.raises(ValueError, match="over 65536 characters"):
        grammar_of(BY_NAME["hermes"], [tool])


def test_channel_calls_hold_the_input_in_a_message() -> None:
    format = BY_NAME["harmony"]
    assert isinstance(format, ChannelFormat)
    assert head_of(format, TOOLS[1]).endswith("to=functions.patch<|message|>")
    start = grammar_of(format, TOOLS).partition("\n")[0]
    assert re.search(r"\)\? \((call\d+ \| ){3}call\d+\)$", start), "thoughts may precede any"
