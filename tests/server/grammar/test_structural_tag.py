"""Structural tags as grammars: the texts that llguidance lets pass, with and without tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from server.grammar.llguidance_grammar import translated
from server.grammar.structural_tag import MAX_PARTS, StructuralTagError, StructuralTagGrammar
from server.text.wanted_grammar import JSON_OPTIONS
from tests.support.reference_data import BYTE_LEVEL, located, reference

A_NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
NAMES = {
    "type": "triggered_tags",
    "triggers": ["<f=", "<g"],
    "tags": [
        {"type": "tag", "begin": "<f=a>", "content": A_NUMBER, "end": "</f>"},
        {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"},
        {"type": "tag", "begin": "<g>", "content": A_NUMBER, "end": ["</g>", ";"]},
    ],
}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
YES = {"type": "const_string", "value": "yes"}
NO = {"type": "const_string", "value": "no"}


@pytest.fixture(scope="module", params=[BYTE_LEVEL, reference("tokenizers/qwen2.5")])
def folder(request: pytest.FixtureRequest) -> Path:
    return located(request.param)


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def llg(folder: Path, vocabulary: tokenizers.Tokenizer) -> LLTokenizer:
    end = vocabulary.token_to_id("<|endoftext|>")
    assert end is not None
    size = vocabulary.get_vocab_size()
    return LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=size, eos_token=[end])


@pytest.fixture(scope="module")
def tokens(vocabulary: tokenizers.Tokenizer) -> dict[str, int]:
    added = vocabulary.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added}


def source(tag: dict[str, Any], tokens: dict[str, int]) -> str:
    grammar = StructuralTagGrammar(tokens, JSON_OPTIONS, translated)
    grammars = [{"lark_grammar": grammar.text(tag)}]
    grammars += [{"name": name, "lark_grammar": text} for name, text in grammar.inner.items()]
    return json.dumps({"grammars": grammars})


@pytest.fixture
def passes(llg: LLTokenizer, vocabulary: tokenizers.Tokenizer, tokens: dict[str, int]) -> Any:
    def run(tag: dict[str, Any], text: str) -> bool:
        """Return whether `text` is a whole answer. Tokens in it are tokens."""
        matcher = LLMatcher(llg, source(tag, tokens), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = vocabulary.encode(text, add_special_tokens=False).ids
        for number in ids:
            if not matcher.validate_tokens([number]):
                return False
            assert matcher.consume_token(number)
        return bool(matcher.is_accepting())

    return run


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        (YES, ["yes"], ["no", "yes!", ""]),
        (A_NUMBER, ["12"], ["a"]),
        ({"type": "regex", "pattern": "[a-c]+/"}, ["ab/"], ["d/", "ab"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, ["x", "yyx"], ["y"]),
        ({"type": "any_text", "excludes": ["<f=", "bad"]}, ["", "good <f"], ["a bad b", "<f="]),
        ({"type": "sequence", "elements": [YES, NO]}, ["yesno"], ["yes", "noyes"]),
        ({"type": "or", "elements": [YES, NO]}, ["yes", "no"], ["yesno"]),
        ({"type": "optional", "content": YES}, ["", "yes"], ["yesyes"]),
        ({"type": "star", "content": YES}, ["", "yesyes"], ["no"]),
        ({"type": "plus", "content": YES}, ["yes", "yesyes"], [""]),
        ({"type": "repeat", "content": YES, "min": 2, "max": 3}, ["yes" * 2, "yes" * 3],
         ["yes", "yes" * 4]),
        ({"type": "repeat", "content": YES, "min": 2, "max": -1}, ["yes" * 5], ["yes"]),
        (THOUGHT, ["<t>a <b </t>", "<t></t>"], ["<t>a", "<t>a</t>b"]),
        ({"type": "sequence", "elements": [THOUGHT, A_NUMBER]}, ["<t>a</t>12"],
         ["12", "<t>a</t>b"]),
        (NAMES, ["", "a < b", "say <f=a>12</f> or <g>5; ok", "<f=b>any <g</f>", "<g>1</g><g>2</g>"],
         ["<f=a>x</f>", "<f=c>", "a <g>1", "<g>1</f>"]),
        (NAMES | {"at_least_one": True}, ["<g>1; and <g>2;"], ["", "a <g>1;"]),
        (NAMES | {"stop_after_first": True}, ["a", "a <g>1;"], ["a <g>1; b"]),
        (NAMES | {"stop_after_first": True, "at_least_one": True}, ["<g>1;"], ["", "<g>1; b"]),
        ({"type": "tag", "begin": "[", "content": NAMES, "end": "]"}, ["[a <g>1; b]", "[]"],
         ["[a", "[a] b"]),
        ({"type": "tags_with_separator", "tags": NAMES["tags"], "separator": ","},
         ["", "<g>1;", "<g>1;,<f=a>2</f>"], ["<g>1;<g>2;", "a"]),
        ({"type": "tags_with_separator", "tags": NAMES["tags"], "separator": ",",
          "at_least_one": True, "stop_after_first": True}, ["<g>1;"], ["", "<g>1;,<g>1;"]),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_format_passes_its_texts_only(
    passes: Any, format_: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": format_}
    assert [text for text in good if not passes(tag, text)] == []
    assert [text for text in bad if passes(tag, text)] == []


def test_older_form_has_structures_and_triggers(passes: Any) -> None:
    structure = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    assert passes(tag, "I say <f=a>3</f> and <f=a>4</f>.")
    assert not passes(tag, "I say <f=a>x</f>.")


def test_mark_that_is_a_token_is_generated_as_that_token(passes: Any, tokens: Any) -> None:
    """`<tool_call>` is one token of this vocabulary, and the trigger is only its start."""
    tool = {"begin": '<tool_call>{"a": ', "content": A_NUMBER, "end": "}</tool_call>"}
    for trigger in ("<tool_call>", "<tool"):
        tag = {"format": {"type": "triggered_tags", "triggers": [trigger], "tags": [tool]}}
        assert passes(tag, 'First. <tool_call>{"a": 7}</tool_call> Then <b>.')
        assert not passes(tag, 'First. <tool_call>{"a": x}</tool_call>')
        assert f"<[{tokens['<tool_call>']}]>" in source(tag, tokens)


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = YES
    for _ in range(depth):
        part = {"type": "sequence", "elements": [part]}
    return part


@pytest.mark.parametrize(
    ("tag", "path", "is_unsupported"),
    [
        ({"format": {"type": "token_dispatch"}}, "format", True),
        ({"format": {"type": "sequence", "elements": [YES, {"type": "token"}]}},
         "format.elements.1", True),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, YES]}},
         "format.elements.0", True),
        ({"format": {"type": "star", "content": NAMES}}, "format.content", True),
        ({"format": A_NUMBER | {"style": "qwen_xml"}}, "format.style", True),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "format.max_tokens", True),
        ({"format": THOUGHT | {"end": {"type": "token", "token": 5}}}, "format.end", True),
        ({"format": NAMES | {"triggers": ["<f=", "<f", "<g"]}}, "format.tags.0.begin", False),
        ({"format": {"type": "const_string"}}, "format.value", False),
        ({"format": {"type": "or", "elements": []}}, "format.elements", False),
        ({"format": {"type": "repeat", "content": YES, "min": 3, "max": 1}}, "format.min", False),
        ({"format": {"type": "json_schema"}}, "format.json_schema", False),
        ({"format": {"type": "or", "elements": [nested(5)] * (MAX_PARTS // 3)}}, None, False),
        ({"format": nested(100)}, None, False),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]},
         "structures.0.begin", False),
        ({"structures": [{"begin": "<a>", "end": 5}], "triggers": ["<a"]}, "structures.0.end",
         False),
        ({"structures": [], "triggers": ["<a"]}, "structures", False),
        ({}, "format", False),
    ],
)  # fmt: skip
def test_part_that_cannot_be_followed_is_named(
    tag: dict[str, Any], path: str | None, is_unsupported: bool
) -> None:
    with pytest.raises(StructuralTagError) as error:
        source(tag, {})
    assert error.value.is_unsupported == is_unsupported
    if path is not None:
        assert error.value.path == path
