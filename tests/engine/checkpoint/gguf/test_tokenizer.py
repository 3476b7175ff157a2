"""Tokenizers from GGUF settings against the tokenizer.json that the settings were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.checkpoint.gguf.tokenizer import build_tokenizer, end_tokens, tokenizer_settings
from engine.errors import ConfigError
from tests.support.reference_data import BYTE_LEVEL, LLAMA, hard_texts, located, reference

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def settings_of(file: Path, kind: str, pre: str = "default") -> dict[str, Any]:
    """Return the settings that llama.cpp's converter would write for this tokenizer.json."""
    given = json.loads(file.read_text())
    added = {token["id"]: token for token in given["added_tokens"]}
    tokens = {number: token for token, number in given["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    ordered = [tokens[number] for number in range(len(tokens))]
    kinds = [
        CONTROL if added.get(number, {}).get("special") else USER if number in added
        else BYTE if kind == "llama" and len(token) == 6 and token.startswith("<0x") else NORMAL
        for number, token in enumerate(ordered)
    ]  # fmt: skip
    merges = given["model"]["merges"]
    settings = {"model": kind, "pre": pre, "tokens": ordered, "token_type": kinds}
    if kind == "gpt2":
        settings["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    else:  # SentencePiece's scores: the later a token was made, the lower
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(
                "".join(pair) if isinstance(pair, list) else pair.replace(" ", ""), rank
            )
        settings["scores"] = [-float(ranks.get(token, 10**9)) for token in ordered]
        settings |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


@pytest.mark.parametrize(
    ("folder", "kind", "pre"),
    [
        (BYTE_LEVEL, "gpt2", "gpt-2"),
        (LLAMA, "llama", "default"),
        reference("tokenizers/gpt2", "gpt2", "gpt-2"),
        reference("tokenizers/qwen2.5", "gpt2", "qwen2"),
        reference("tokenizers/llama2", "llama", "default"),
    ],
)
def test_ids_and_texts_equal_those_of_the_tokenizer(folder: str, kind: str, pre: str) -> None:
    file = located(folder) / "tokenizer.json"
    due = tokenizers.Tokenizer.from_file(str(file))
    found = build_tokenizer(settings_of(file, kind, pre))
    for text in [*hard_texts(), "<s>a</s> <|endoftext|>b"]:
        expected = due.encode(text).ids
        assert found.encode(text).ids == expected, text
        assert found.decode(expected) == due.decode(expected), text


def test_smollm_splits_digits() -> None:
    tokens = [*(chr(letter) for letter in range(33, 127)), "12", "<|end|>"]
    settings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 95 + [CONTROL],
        "tokenizer.ggml.merges": ["1 2"],
    }
    joined = build_tokenizer(settings | {"tokenizer.ggml.pre": "gpt-2"}).encode("12")
    assert joined.tokens == ["12"]
    single = build_tokenizer(settings | {"tokenizer.ggml.pre": "smollm"}).encode("12")
    assert single.tokens == ["1", "2"]


def test_ends_are_added_where_the_file_says_so() -> None:
    settings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "<b>", "<e>"],
        "tokenizer.ggml.token_type": [NORMAL, CONTROL, CONTROL],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
    }
    assert build_tokenizer(settings).encode("a").ids == [0]
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert build_tokenizer(settings | asked).encode("a").ids == [1, 0, 2]
    assert end_tokens(settings) == [2, 0]
    named = tokenizer_settings(settings, 99)
    assert (named["bos_token"], named["eos_token"]) == ("<b>", "<e>")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, "kind 'rwkv'; served are gpt2 and llama"),
        ({"model": None}, "kind None"),
        ({"pre": "jais"}, "like 'jais' \\(tokenizer.ggml.pre\\), which is not served"),
        ({"tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "has no tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "needs 3 numbers in tokenizer.ggml.token_type"),
        ({"merges": ["ab"]}, "the merge 'ab', which names no two tokens"),
        ({"merges": ["a x"]}, "cannot be used"),
        ({"model": "llama", "scores": None}, "needs 3 numbers in tokenizer.ggml.scores"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"model": "gpt2", "tokens": ["a", "b", "c"], "token_type": [1, 1, 1], **changes}
    settings = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(settings)
