"""How DeepSeek's tokenizers split texts: pieces by the rules of their tokenizer.json."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.gguf.tokenizer import build_tokenizer
from tests.engine.checkpoint.gguf.test_tokenizer import byte_tokens


def pieces(pre: str, text: str) -> list[str]:
    """Return the parts of a text that are merged apart from each other."""
    settings = byte_tokens(pre)
    settings["tokenizer.ggml.tokens"].append("ab")
    settings |= {"tokenizer.ggml.token_type": [1] * 257, "tokenizer.ggml.merges": ["a b"]}
    splitter: Any = build_tokenizer(settings).pre_tokenizer
    return [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("Hello World's  x\n\n", ["Hello", " World", "'", "s", " ", " x", "\n", "\n"]),
        ("2024年, 12", ["2024", "年", ",", " ", "12"]),
        ("中文字。“是”", ["中文字", "。“", "是", "”"]),
        ("foo_bar (a+b) ", ["foo", "_", "bar", " (", "a", "+", "b", ")", " "]),
        ("ΔΩЖ Ա ა", ["ΔΩЖ", " Ա", " ", "ა"]),
    ],
)
def test_deepseek_v2_splits_at_scripts_marks_and_lines(text: str, due: list[str]) -> None:
    assert pieces("deepseek-llm", text) == due


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("Hello World's  x\n\n", ["Hello", " World", "'s", " ", " x", "\n\n"]),
        ("2024年, 12345", ["202", "4", "年", ",", " ", "123", "45"]),
        ("中文字。“是”かな", ["中文字", "。“", "是", "”", "かな"]),
        ("foo_bar (a+b);\n x", ["foo", "_bar", " (", "a", "+b", ");\n", " x"]),
        ("na\u0308ive \u2192!", ["na\u0308ive", " \u2192!"]),
    ],
)
def test_deepseek_v3_splits_numbers_in_threes_and_han_apart(text: str, due: list[str]) -> None:
    assert pieces("deepseek-v3", text) == due
