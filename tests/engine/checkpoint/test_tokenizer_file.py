"""tokenizer.json: its limits are checked before the tokenizers library reads it."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.tokenizer_file import (
    LONGEST_TOKEN,
    MAX_ADDED_CHARACTERS,
    MAX_ADDED_TOKENS,
    MAX_BYTES,
    MAX_VALUES,
    check_tokenizer_file,
)
from engine.errors import ConfigError
from tests.support.reference_data import (
    BYTE_LEVEL,
    LLAMA,
    UNIGRAM,
    WORDPIECE,
    located,
    reference,
)


def added(*contents: str) -> dict[str, Any]:
    return {"added_tokens": [{"id": i, "content": text} for i, text in enumerate(contents)]}


def vocabulary(*tokens: str) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}}


def pieces(*tokens: str) -> dict[str, Any]:
    return {"model": {"type": "Unigram", "vocab": [[token, 0.0] for token in tokens]}}


LONG = "é" * (LONGEST_TOKEN + 1)
ALL_LONG = [str(n) * LONGEST_TOKEN for n in range(10)] * (MAX_ADDED_CHARACTERS // 40_000)
# Each file that is refused, with the words of the message.
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an added token": (
        lambda: added("a", LONG),
        f"a token of {len(LONG)} characters; at most 4096",
    ),
    "a token": (lambda: vocabulary("a", LONG), f"a token of {len(LONG)} characters; at most 4096"),
    "a piece": (lambda: pieces("a", LONG), f"a token of {len(LONG)} characters; at most 4096"),
    "added tokens": (
        lambda: added(*map(str, range(MAX_ADDED_TOKENS + 1))),
        f"{MAX_ADDED_TOKENS + 1} added tokens; at most {MAX_ADDED_TOKENS}",
    ),
    "characters of added tokens": (
        lambda: added(*ALL_LONG),
        f"added tokens of {len(ALL_LONG) * LONGEST_TOKEN} characters in all; at most",
    ),
    "values": (lambda: {"merges": [0] * MAX_VALUES}, f"values; at most {MAX_VALUES} are read"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_file_beyond_a_limit_is_refused_with_the_limit(
    tmp_path: Path, make: Callable[[], dict[str, Any]], words: str
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(make()))
    with pytest.raises(ConfigError, match=words) as refused:
        check_tokenizer_file(file)
    assert str(file) in str(refused.value)
    assert len(str(refused.value)) < 500


def test_large_file_is_refused_by_its_size_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, 6 << 30)
    tracemalloc.start()
    with pytest.raises(ConfigError) as refused:
        check_tokenizer_file(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(refused.value) == (
        f"Cannot read {file}: it has {6 << 30} bytes; at most {MAX_BYTES} are read."
    )
    assert peak < 10_000_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: added(*(f"<|s_{n}|>" for n in range(65_536))),
        lambda: vocabulary("a" * LONGEST_TOKEN),
        lambda: pieces("a" * LONGEST_TOKEN),
        lambda: {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]] * 600_000}},
    ],
    ids=["65,536 added tokens", "token", "piece", "600,000 merges"],
)
def test_file_within_the_limits_passes(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(make()))
    check_tokenizer_file(file)


@pytest.mark.parametrize(
    "name",
    [
        BYTE_LEVEL,
        LLAMA,
        UNIGRAM,
        WORDPIECE,
        reference("tokenizers/gpt2"),
        reference("tokenizers/llama2"),
        reference("tokenizers/qwen2.5"),
        reference("tokenizers/t5"),
        reference("tokenizers/bert-uncased"),
    ],
)
def test_published_file_passes(name: str) -> None:
    check_tokenizer_file(located(name) / "tokenizer.json")


@pytest.mark.parametrize("text", ["", "[]", '{"model": {"vocab": 1}}', '{"added_tokens": [1]}'])
def test_malformed_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"Cannot read .*tokenizer\.json"):
        check_tokenizer_file(file)
