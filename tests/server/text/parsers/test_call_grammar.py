"""The grammar of each format allows its calls, holds the arguments, and ends with the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from server.text.marks import Marks
from server.text.parsers.call_grammar import call_grammar, reasoning_grammar
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import (
    BY_NAME,
    CALL_FORMATS,
    REASONING_BY_NAME,
    AnyCallFormat,
    CallFormat,
    ChannelFormat,
    Reasoning,
)
from server.text.parsers.syntax import State, make_syntax
from server.text.tools import Tool, ToolUse
from tests.support.hostile_tools import HOSTILE_PARAMETERS
from tests.support.reference_data import BYTE_LEVEL, located, reference
from tests.support.written_calls import written

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "on": {"type": "boolean"},
        "more": {"type": "object"},
    },
    "required": ["city", "days"],
}
WEATHER = Tool("weather", SCHEMA, {}, is_strict=True)
OTHER = Tool("now", {"type": "object", "properties": {}}, {}, is_strict=True)
GOOD = [("weather", {"city": "Rome, Italy", "unit": "C", "days": 3}), ("now", {})]
JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{1,8}"}
REASONING_TOKENS = {"<think>": 151665, "</think>": 151666}


class Vocabulary:
    """A vocabulary that has tokens for <tool_call> and </tool_call>."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self.llguidance = LLTokenizer(file.read_text(encoding="utf-8"))
        names = ("<tool_call>", "</tool_call>")
        self.marks = Marks({name: self.tokenizer.token_to_id(name) for name in names})

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether the grammar allows the text, and its end."""
        source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
        matcher = LLMatcher(self.llguidance, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.validate_tokens(ids) < len(ids):
            return False
        matcher.consume_tokens(ids)
        return bool(matcher.is_accepting())


@pytest.fixture(scope="module", params=[BYTE_LEVEL, reference("tokenizers/qwen2.5")])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(located(request.param) / "tokenizer.json")


def answers_of(
    format: AnyCallFormat, vocabulary: Vocabulary, reasoning: Reasoning | None = None
) -> AnswerFormat:
    syntax = make_syntax(format, reasoning, vocabulary.marks)
    plain = make_syntax(None, reasoning, vocabulary.marks)
    return AnswerFormat(format, reasoning, "table", True, syntax, plain)


def use(mode: str = "required", **fields: object) -> ToolUse:
    return ToolUse([WEATHER, OTHER], mode, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda format: format.name)
def test_grammar_of_every_format_allows_its_calls_and_no_others(format, vocabulary) -> None:
    answers = answers_of(format, vocabulary)
    grammar = call_grammar(answers, use(), State.CONTENT, JSON_OPTIONS)
    called = GOOD[:1] if isinstance(format, ChannelFormat) else GOOD
    assert vocabulary.accepts(grammar, written(format, called))
    assert vocabulary.accepts(grammar, written(format, GOOD[1:]))
    for wrong in (
        [("weather", {"city": "Rome"})],
        [("weather", {"city": "Rome", "days": "three"})],
        [("weather", {"city": "Rome", "unit": "K", "days": 3})],
        [("rain", {"city": "Rome", "days": 3})],
    ):
        assert not vocabulary.accepts(grammar, written(format, wrong)), wrong
    assert not vocabulary.accepts(grammar, "Just text.")


@pytest.mark.parametrize("format", CALL_FORMATS, ids=lambda format: format.name)
def test_grammar_allows_every_kind_of_argument(format, vocabulary) -> None:
    answers = answers_of(format, vocabulary)
    grammar = call_grammar(answers, use(), State.CONTENT, JSON_OPTIONS)
    arguments = {"city": "Rome", "days": -3, "on": True, "more": {"a": [1, "b"]}}
    if format.name in ("lfm2", "pythonic"):
        del arguments["more"]  # written with Python's quotes; the grammar has JSON's
    assert vocabulary.accepts(grammar, written(format, [("weather", arguments)]))


@pytest.mark.parametrize(
    "format", [f for f in CALL_FORMATS if isinstance(f, CallFormat)], ids=lambda f: f.name
)
def test_grammar_of_auto_allows_text_and_holds_calls(format, vocabulary) -> None:
    answers = answers_of(format, vocabulary)
    grammar = call_grammar(answers, use("auto"), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, "Just text.")
    assert vocabulary.accepts(grammar, written(format, GOOD))
    wrong = [("weather", {"city": "Rome", "days": "three"})]
    assert not vocabulary.accepts(grammar, written(format, wrong))
    if format.is_bare:
        assert vocabulary.accepts(grammar, '{"name": "Bob", "age": 3}')
        assert vocabulary.accepts(grammar, "[1] is a citation.")
    else:
        assert vocabulary.accepts(grammar, "One moment." + written(format, GOOD))


def test_grammar_without_parallel_calls_ends_after_one(vocabulary) -> None:
    format = BY_NAME["hermes"]
    answers = answers_of(format, vocabulary)
    grammar = call_grammar(answers, use(allows_parallel=False), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, written(format, GOOD[:1]))
    assert not vocabulary.accepts(grammar, written(format, GOOD))


def test_grammar_of_a_named_function_allows_only_it(vocabulary) -> None:
    format = BY_NAME["qwen3_coder"]
    answers = answers_of(format, vocabulary)
    grammar = call_grammar(answers, use(name="now"), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, written(format, GOOD[1:]))
    assert not vocabulary.accepts(grammar, written(format, GOOD[:1]))


def test_grammar_begins_with_reasoning(vocabulary) -> None:
    format, think = BY_NAME["hermes"], REASONING_BY_NAME["think"]
    answers = answers_of(format, vocabulary, think)
    calls = written(format, GOOD)
    opened = call_grammar(answers, use(), State.REASONING, JSON_OPTIONS)
    assert vocabulary.accepts(opened, f"I </ think.\n</think>\n\n{calls}")
    assert not vocabulary.accepts(opened, calls)
    closed = call_grammar(answers, use(), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(closed, f"<think>\nI think.\n</think>\n\n{calls}")
    assert vocabulary.accepts(closed, calls)


def test_grammar_has_no_reasoning_if_the_prompt_would_have_opened_it(vocabulary) -> None:
    format, think = BY_NAME["hermes"], REASONING_BY_NAME["think"]
    answers = replace(answers_of(format, vocabulary, think), is_opened_on_request=True)
    calls = written(format, GOOD)
    grammar = call_grammar(answers, use(), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, calls)
    assert not vocabulary.accepts(grammar, f"<think>\nI think.\n</think>\n\n{calls}")
    assert reasoning_grammar(answers, State.CONTENT, JSON_OPTIONS) == ""
    opened = call_grammar(answers, use(), State.REASONING, JSON_OPTIONS)
    assert vocabulary.accepts(opened, f"I think.\n</think>\n\n{calls}")


def test_reasoning_comes_before_structured_output(vocabulary) -> None:
    answers = answers_of(BY_NAME["hermes"], vocabulary, REASONING_BY_NAME["think"])
    grammar = reasoning_grammar(answers, State.REASONING, JSON_OPTIONS)
    inner = grammar.replace("@answer", "answer") + 'answer: "yes" | "no"\n'
    assert vocabulary.accepts(inner, "Well.\n</think>\n\nyes")
    assert not vocabulary.accepts(inner, "yes")
    assert reasoning_grammar(answers_of(BY_NAME["hermes"], vocabulary), State.CONTENT, {}) == ""


@pytest.mark.variants(14)
@pytest.mark.parametrize("name", HOSTILE_PARAMETERS)
def test_hostile_parameters_give_a_grammar_or_the_reason_why_not(name, vocabulary) -> None:
    """A schema that the grammar's compiler refuses is a 400; nothing else may fail."""
    tool = Tool("f", HOSTILE_PARAMETERS[name], {}, is_strict=True)
    for format in CALL_FORMATS:
        for mode in ("required", "auto"):
            answers = answers_of(format, vocabulary)
            use = ToolUse([tool], mode)
            if name == "bignum":
                with pytest.raises(ValueError, match="minimum has the number -10000"):
                    call_grammar(answers, use, State.CONTENT, JSON_OPTIONS)
                continue
            grammar = call_grammar(answers, use, State.CONTENT, JSON_OPTIONS)
            source = json.dumps({"grammars": [{"lark_grammar": grammar}]})
            matcher = LLMatcher(vocabulary.llguidance, source, log_level=0)
            assert not matcher.is_error() or matcher.get_error()


def test_arguments_are_an_object_even_if_the_schema_says_another_type(vocabulary) -> None:
    tool = Tool("f", {"type": "string"}, {})
    answers = answers_of(BY_NAME["hermes"], vocabulary)
    grammar = call_grammar(answers, ToolUse([tool], "required"), State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, written(BY_NAME["hermes"], [("f", {"a": 1})]))


@pytest.mark.parametrize("format", ["qwen3_coder", "gemma4", "pythonic"])
def test_choices_of_a_text_are_its_texts(format, vocabulary) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": [1, None, "x"]}}}
    answers = answers_of(BY_NAME[format], vocabulary)
    use = ToolUse([Tool("f", schema, {})], "required")
    grammar = call_grammar(answers, use, State.CONTENT, JSON_OPTIONS)
    assert vocabulary.accepts(grammar, written(BY_NAME[format], [("f", {"a": "x"})]))
    assert not vocabulary.accepts(grammar, written(BY_NAME[format], [("f", {"a": "y"})]))
