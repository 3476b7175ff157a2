"""The texts that a schema allows, as a terminal of a grammar."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from server.text.parsers.text_rules import ANY, texts_of


def taken(schema: dict[str, Any], texts: list[str]) -> list[str]:
    """Return those of the texts that the terminal of the schema takes."""
    terminal = texts_of(schema, schema)
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}\n")
    found = []
    for text in texts:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"maxLength": 3}, ["", "abc", "\u00e9\u00e9\n"], ["abcd"]),
        ({"minLength": 2.0}, ["ab", "abcdef"], ["a"]),
        ({"pattern": "^[A-Z]{2}-[0-9]{3}$"}, ["AB-123"], ["AB-12", "xAB-123", "AB-1234"]),
        ({"pattern": "b"}, ["b", "abc", "\nb\n"], ["ac", ""]),
        ({"pattern": "^a|b$"}, ["ax", "xb", "ab"], ["xa", "bx"]),
        ({"pattern": "(a|b)c"}, ["xacx", "bc"], ["ab"]),
        ({"pattern": "^[|(]$"}, ["|", "("], ["x", ""]),
        ({"pattern": r"^\$$"}, ["$"], ["x"]),
        ({"pattern": r"\$"}, ["a$b"], ["ab"]),
        ({"pattern": r"^a/b\/c\\$"}, ["a/b/c\\"], ["a/b/c"]),
        ({"pattern": "^a\nb$"}, ["a\nb"], ["a b"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "soon"]),
        ({"format": "uri"}, ["http://a/b"], ["a/b"]),
        ({"format": "colour", "maxLength": 4}, ["blue"], ["green"]),
        ({"enum": ["a/b", 7, "c"]}, ["a/b", "c"], ["7", "a"]),
        ({"anyOf": [{"maxLength": 1}, {"pattern": "^ab$"}, {"type": "null"}]}, ["x", "ab"], ["xy"]),
        ({"allOf": [{"minLength": 2}, {"pattern": "a"}]}, ["ab"], ["a", "bb"]),
        ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {"pattern": "a"}}}, ["ab"], ["abc"]),
    ],
)
def test_terminal_takes_what_the_schema_allows(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert taken(schema, [*good, *bad]) == good


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": ["string", "null"], "description": "x"},
        {"anyOf": [{"maxLength": 1}, {"type": "string"}]},
        {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        {"format": "colour"},
        {"$ref": "#"},
        {"maxLength": True, "minLength": "2"},
    ],
)
def test_schema_that_says_nothing_of_texts_has_no_terminal(schema: dict[str, Any]) -> None:
    assert texts_of(schema, schema) == ANY
