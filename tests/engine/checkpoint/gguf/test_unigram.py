"""Unigram tokenizers of GGUF files: the tokens are those of llama.cpp and of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.gguf.tokenizer import build_tokenizer
from engine.errors import ConfigError

WORDS = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "▁the", "the", "e", "é", "1", "ﬁ", "fi", "!"]
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<own>", "<mask>"]
KINDS = [3, 3, 3, 2, *[1] * len(WORDS), 4, 3]
SCORES = [0.0] * 4 + [-1.0 - 0.37 * (7 * number % 11) for number in range(len(WORDS))] + [0.0, 0.0]
TEXTS = (
    *("ab abc", "the  thebc", " a  b ", "", "xyz a", "a x y", "été ﬁ fi", "a\tb\nc"),
    *("a<own>b", "the!11", "<s>a", "x" * 40, "\u3000ab\u00a0c", "zz中文zz"),
)
# Of each text. By the libllama of llama-cpp-python 0.3.36, with parse_special.
DUE: dict[str, list[list[int]]] = {
    "joined": [
        [0, 4, 9, 8, 11, 2],
        [0, 12, 12, 11, 2],
        [0, 8, 4, 6, 2],
        [0, 2],
        [0, 4, 3, 8, 2],
        [0, 8, 4, 3, 4, 3, 2],
        [0, 4, 15, 3, 15, 4, 17, 4, 18, 2],
        [0, 8, 3, 6, 3, 7, 2],
        [0, 8, 20, 4, 6, 2],
        [0, 12, 19, 16, 16, 2],
        [0, 0, 8, 2],
        [0, 4, 3, 2],
        [0, 4, 3, 9, 3, 7, 2],
        [0, 4, 3, 2],
    ],
    "kept": [
        [0, 4, 9, 8, 11, 2],
        [0, 12, 4, 12, 11, 2],
        [0, 4, 8, 4, 4, 6, 4, 2],
        [0, 2],
        [0, 4, 3, 8, 2],
        [0, 8, 4, 3, 4, 3, 2],
        [0, 4, 15, 3, 15, 4, 17, 4, 18, 2],
        [0, 8, 3, 6, 3, 7, 2],
        [0, 8, 20, 4, 6, 2],
        [0, 12, 19, 16, 16, 2],
        [0, 0, 8, 2],
        [0, 4, 3, 2],
        [0, 4, 3, 9, 3, 7, 2],
        [0, 4, 3, 2],
    ],
    "bare": [
        [0, 9, 8, 11, 2],
        [0, 13, 4, 12, 11, 2],
        [0, 8, 4, 4, 6, 4, 2],
        [0, 2],
        [0, 3, 8, 2],
        [0, 5, 4, 3, 4, 3, 2],
        [0, 15, 3, 15, 4, 17, 4, 18, 2],
        [0, 5, 3, 6, 3, 7, 2],
        [0, 5, 20, 6, 2],
        [0, 13, 19, 16, 16, 2],
        [0, 0, 5, 2],
        [0, 3, 2],
        [0, 3, 9, 3, 7, 2],
        [0, 3, 2],
    ],
}


def settings(**more: Any) -> dict[str, Any]:
    given = {
        "model": "t5",
        "pre": "default",
        "tokens": TOKENS,
        "token_type": KINDS,
        "scores": SCORES,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "padding_token_id": 1,
        "add_bos_token": True,
        "add_eos_token": True,
        "add_space_prefix": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (given | more).items()}


CHANGES: dict[str, dict[str, Any]] = {
    "joined": {"remove_extra_whitespaces": True},
    "kept": {"remove_extra_whitespaces": False},
    "bare": {"remove_extra_whitespaces": False, "add_space_prefix": False},
}


@pytest.mark.parametrize("spaces", CHANGES)
def test_tokens_of_texts_are_those_of_llama_cpp(spaces: str) -> None:
    tokenizer = build_tokenizer(settings(**CHANGES[spaces]))
    for text, due in zip(TEXTS, DUE[spaces], strict=True):
        assert tokenizer.encode(text).ids == due, text


def test_decoded_tokens_are_the_text_without_its_mark() -> None:
    tokenizer = build_tokenizer(settings(remove_extra_whitespaces=True))
    assert tokenizer.decode(tokenizer.encode("the ab  c").ids) == "the ab c"


def test_characters_are_normalised_by_the_table_of_the_file() -> None:
    """The table has one entry: "a" becomes "b". It is a tree of units of 32 bits, then texts."""
    units = [0] * 256
    units[0] = 1 << 10  # children of the root are at 1 ^ letter
    units[1 ^ ord("a")] = ord("a") | 1 << 8 | (128 << 10)  # has a leaf at 128 ^ itself
    units[(1 ^ ord("a")) ^ 128] = 0  # whose value is the text at 0
    tree = b"".join(unit.to_bytes(4, "little") for unit in units)
    table = list(len(tree).to_bytes(4, "little") + tree + b"b\0")
    tokenizer = build_tokenizer(settings(precompiled_charsmap=table))
    assert tokenizer.encode("ac").ids == tokenizer.encode("bc").ids
    assert tokenizer.encode("ac").ids != build_tokenizer(settings()).encode("ac").ids


@pytest.mark.parametrize("table", [[1, 2], [255, 255, 255, 127, 0], ["a"], [4, 0, 0, 0, 1]])
def test_cut_table_is_refused(table: list[Any]) -> None:
    with pytest.raises(ConfigError, match="precompiled_charsmap"):
        build_tokenizer(settings(precompiled_charsmap=table))


def test_tokenizer_without_an_unknown_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown_token_id"):
        build_tokenizer(settings(tokens=["a"], token_type=[1], scores=[0.0], unknown_token_id=9))
