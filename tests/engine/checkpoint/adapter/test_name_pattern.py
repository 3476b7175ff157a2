"""Patterns for names of modules: those of PEFT, in linear time."""

from __future__ import annotations

import re
import time

import pytest

from engine.checkpoint.adapter.name_pattern import NamePattern

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.down_proj",
    "q_proj",
    "xq_proj",
    "layers_0_self_attn_q_proj",
    "a.b",
    "b",
]


@pytest.mark.parametrize(
    "text",
    [
        "q_proj", "b", ".", "..", "^b", "^b$", "b$", "layers.0.self_attn.q_proj",
        r"layers\.0\.self_attn\.q_proj", "^model.layers.0.self_attn.q_proj",
        r"layers.\d+.mlp.(up|down)_proj", "b|q_proj", ".*", "(?P<kind>[qkv])_proj", "[^x]q_proj",
        "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_pattern_matches_as_in_peft(text: str, name: str) -> None:
    """peft.utils.other.get_pattern_key of PEFT 0.21.2: a match of `(.*\\.)?(PATTERN)$`."""
    expected = re.match(rf"(.*\.)?({text})\Z", name, re.DOTALL) is not None
    assert NamePattern(text).matches(name) is expected


def test_pattern_that_backtracks_takes_linear_time() -> None:
    """With Python's `re`, 30 characters take minutes."""
    begun = time.monotonic()
    assert not NamePattern("(x+x+)+y").matches("x" * 10_000)
    assert time.monotonic() - begun < 5
