"""Whether llguidance's grammar of a JSON schema accepts a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from server.text import exact_json
from server.text.guided_schema import guided


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose tokens are bytes."""
    return LLTokenizer("byte")


def matcher_of(schema: dict[str, Any], *, is_bounded: bool = False) -> LLMatcher:
    """Return a matcher for answers that fit a schema. No white space is allowed."""
    adapted = guided(schema, {"whitespace_flexible": False}, is_bounded=is_bounded)
    source = exact_json.text({"grammars": [{"json_schema": adapted}]})
    return LLMatcher(byte_tokenizer(), source, log_level=0)


def accepted(
    schema: dict[str, Any], answers: Sequence[str], *, is_bounded: bool = False
) -> list[str]:
    """Return the answers that the grammar of a schema accepts. It must be possible to compile."""
    matcher = matcher_of(schema, is_bounded=is_bounded)
    assert not matcher.is_error(), matcher.get_error()
    return [answer for answer in answers if _accepts(matcher.deep_copy(), answer)]


def _accepts(matcher: LLMatcher, answer: str) -> bool:
    json.loads(answer)
    tokens = byte_tokenizer().tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
