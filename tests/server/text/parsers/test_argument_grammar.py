"""The grammar of arguments without quotes: what it lets through is read back as the schema says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from server.text.marks import Marks
from server.text.parsers.call_grammar import call_grammar
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import BY_NAME, AnyCallFormat
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.tools import Tool, ToolUse
from tests.server.conftest import byte_tokenizer
from tests.support.parsing import parse
from tests.support.written_calls import written

JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{1,8}"}
NAMES = {
    "name": {"type": "string"},
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}


class Grammar:
    """A grammar over bytes, with the tokens of a format."""

    def __init__(self, format: AnyCallFormat, schema: dict[str, Any], *, tokens: bool) -> None:
        texts = [text.strip() for text in literals(format, None)]
        marks = [text for text in texts if text[0] == "<" and text[-1] == ">"] if tokens else []
        self.tokenizer = byte_tokenizer()
        self.tokenizer.add_special_tokens(marks)
        ids = {text: self.tokenizer.token_to_id(text) for text in marks}
        self.syntax: Syntax = make_syntax(format, None, Marks(ids))
        answers = AnswerFormat(format, None, "table", True, self.syntax, self.syntax)
        parameters = {"type": "object", "properties": {"a": schema}, "$defs": NAMES}
        self.tools = {"f": Tool("f", {**parameters, "required": ["a"]}, {})}
        use = ToolUse(list(self.tools.values()), "required")
        text = call_grammar(answers, use, State.CONTENT, JSON_OPTIONS)
        source = json.dumps({"grammars": [{"lark_grammar": text}]})
        self.matcher = LLMatcher(LLTokenizer(self.tokenizer.to_str()), source, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        """Return whether the grammar allows the text, and its end."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.matcher.reset()
        if self.matcher.validate_tokens(ids) < len(ids):
            return False
        self.matcher.consume_tokens(ids)
        return bool(self.matcher.is_accepting())

    def read(self, text: str) -> Any:
        """Return the argument that the parser reads, and check that pieces change nothing."""
        marked = self.syntax.marks.encode(text)
        answer = parse(self.syntax, [marked], self.tools)
        assert parse(self.syntax, list(marked), self.tools) == answer
        ((_, arguments),) = answer.calls
        return json.loads(arguments)["a"]


SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    # a schema, values between tags that its grammar lets through, and others that it does not
    "text": ({"type": "string"}, ["12", "", "null", "a < b", '"x"'], []),
    "optional": ({"type": ["string", "null"]}, ["12", "1.50", "null", "x", ""], []),
    "any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["12", "null"], []),
    "reference": ({"$ref": "#/$defs/name"}, ["12", "true"], []),
    "or number": ({"type": ["string", "number"]}, ["12", "1.50", "007", "twelve"], []),
    "short or number": (
        {"type": ["string", "number"], "maxLength": 3, "maximum": 50},
        ["12", "abc", "1.5"], ["abcd", "99", '"ab"', "007"],
    ),
    "coded": ({"type": "string", "pattern": "^[A-Z]-[0-9]$"}, ["A-1"], ["a-1", "A-12", "xA-1"]),
    "dated": ({"type": ["string", "null"], "format": "date"}, ["2024-02-29", "null"], ["soon"]),
    "untyped": ({}, ["12", "x y", '{"b": 1}'], []),
    "integer": ({"type": "integer"}, ["12", "-3"], ["x", "1.5", "007", "True", '"12"']),
    "number": ({"type": ["number", "null"]}, ["1.50", "12", "null"], ["x", '"12"']),
    "boolean": ({"type": "boolean"}, ["true"], ["yes", "1"]),
    "choices": ({"enum": ["a", "12"]}, ["a", "12"], ["b", "1"]),
    "const": ({"const": "12"}, ["12"], ["13"]),
    "mixed": ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", "2"]),
    "word or integer": (
        {"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, ["auto", "7"], ["x", "1.5"],
    ),
    "object": ({"$ref": "#/$defs/point"}, ['{"x": 1}'], ['{"x": "1"}', "x"]),
    "text or object": (
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
        ["x", '{"x": 1}', "12", "a {}"],
        ['{"x": "1"}', "{}"],
    ),
}  # fmt: skip
TAGGED = ("qwen3_coder", "seed_oss", "glm", "minimax_m2")


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("case", SCHEMAS)
@pytest.mark.variants(70)
def test_value_that_the_grammar_lets_through_is_read_as_the_schema_says(
    name: str, case: str, tokens: bool
) -> None:
    schema, good, bad = SCHEMAS[case]
    grammar = Grammar(BY_NAME[name], schema, tokens=tokens)
    validator = jsonschema.Draft202012Validator({**schema, "$defs": NAMES})
    for value in good:
        text = written(BY_NAME[name], [("f", {"a": value})])
        assert grammar.accepts(text), value
        assert validator.is_valid(grammar.read(text)), value
    for value in bad:
        assert not grammar.accepts(written(BY_NAME[name], [("f", {"a": value})])), value


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2"])
def test_text_up_to_its_mark_is_the_same_for_grammar_and_parser(name: str) -> None:
    """The closing mark without the line break after it ends the text for both."""
    grammar = Grammar(BY_NAME[name], {"type": "string"}, tokens=False)
    for value in ("a</parameter>b", "a\n</parameter> b"):
        assert not grammar.accepts(written(BY_NAME[name], [("f", {"a": value})]))


@pytest.mark.parametrize("name", ["pythonic", "gemma4", "lfm2", "functiongemma"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, ["12", None, "x"], [12, True, [1], {"b": 1}]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["12", 12], [None, True, [1]]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", 2, None]),
        ({"const": "a"}, ["a"], ["b", 1]),
        ({"type": ["boolean", "null"]}, [True, None], ["x", 1]),
        ({"type": ["integer", "array"]}, [1, [1]], ["x", None, {"b": 1}]),
        ({"$ref": "#/$defs/name"}, ["x"], [1]),
        ({"type": "string", "pattern": "^[A-Z]-[0-9]$"}, ["A-1"], ["a-1", "A-12", ""]),
        ({"type": ["string", "null"], "format": "date"}, ["2024-02-29", None], ["soon", "null"]),
        ({"type": "string", "maxLength": 2}, ["", "ab", "b"], ["abc"]),
        ({"type": "string", "pattern": "^it's$"}, ["it's"], ["its"]),
    ],
)
def test_literal_of_another_type_is_not_let_through(name, schema, good, bad) -> None:
    grammar = Grammar(BY_NAME[name], schema, tokens=True)
    for value in good:
        text = written(BY_NAME[name], [("f", {"a": value})])
        assert grammar.accepts(text), value
        assert grammar.read(text) == value
    for value in bad:
        assert not grammar.accepts(written(BY_NAME[name], [("f", {"a": value})])), value


@pytest.mark.parametrize("name", TAGGED)
def test_arguments_behind_a_reference_are_in_the_grammar(name: str) -> None:
    format = BY_NAME[name]
    syntax = make_syntax(format, None, Marks({}))
    answers = AnswerFormat(format, None, "table", True, syntax, syntax)
    tool = Tool("f", {"$ref": "#/$defs/point", "$defs": NAMES}, {})
    text = call_grammar(answers, ToolUse([tool], "required"), State.CONTENT, JSON_OPTIONS)
    tokenizer = byte_tokenizer()
    source = json.dumps({"grammars": [{"lark_grammar": text}]})
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str()), source, log_level=0)
    ids = tokenizer.encode(written(format, [("f", {"x": 3})]), add_special_tokens=False).ids
    assert matcher.validate_tokens(ids) == len(ids)
