"""Tokenizers from GGUF settings against the tokenizer.json that the settings were made from."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.checkpoint.gguf import tokenizer
from engine.checkpoint.gguf.pre_tokenizers import QWEN35
from engine.checkpoint.gguf.tokenizer import (
    build_tokenizer,
    end_tokens,
    tokenizer_notes,
    tokenizer_settings,
)
from engine.checkpoint.tokenizer_file import LONGEST_TOKEN
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
    for text in [*hard_texts(), "<s>a <|endoftext|>b"]:
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


SPLITTING = "Don't 12345!? a=b <x> ~5%"
# By the libllama of llama-cpp-python 0.3.36, of a vocabulary that joins the characters of WORDS.
DEFAULT_SPLIT = [
    "Don",
    "'",
    "t",
    "Ġ",
    "123",
    "45",
    "!?",
    "Ġ",
    "a",
    "=",
    "b",
    "Ġ",
    "<",
    "x",
    ">",
    "Ġ",
    "~",
    "5",
    "%",
]
GPT2_SPLIT = [
    "Don",
    "'t",
    "Ġ",
    "123",
    "45",
    "!?",
    "Ġ",
    "a",
    "=",
    "b",
    "Ġ<",
    "x",
    ">",
    "Ġ~",
    "5",
    "%",
]
WORDS = ["Don", "'t", "123", "45", "12345", "!?", " 123", " 12345", "=b", " <", " ~", "~5", "5%"]


def byte_level_settings(**more: Any) -> dict[str, Any]:
    """Return a tokenizer that joins the characters of WORDS, so that ids show the splits."""
    letters = [chr(letter) for letter in range(33, 127)] + ["Ġ"]
    tokens, merges = list(letters), []
    for word in (word.replace(" ", "Ġ") for word in WORDS):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                tokens.append(word[:end])
    given = {"model": "gpt2", "tokens": tokens, "token_type": [NORMAL] * len(tokens)}
    settings = {f"tokenizer.ggml.{key}": value for key, value in (given | more).items()}
    return settings | {"tokenizer.ggml.merges": merges}


def tokens_of(settings: dict[str, Any]) -> list[str]:
    return build_tokenizer(settings).encode(SPLITTING, add_special_tokens=False).tokens


@pytest.mark.parametrize("pre", [None, "default"])
def test_file_without_a_split_is_split_by_llama_cpps_default(pre: str | None) -> None:
    settings = byte_level_settings(**({} if pre is None else {"pre": pre}), eos_token_id=0)
    assert tokens_of(settings) == DEFAULT_SPLIT
    assert tokens_of(settings | {"tokenizer.ggml.pre": "gpt-2"}) == GPT2_SPLIT
    [note] = tokenizer_notes(settings)
    assert "does not say how its tokenizer splits texts (tokenizer.ggml.pre)" in note
    assert tokenizer_notes(settings | {"tokenizer.ggml.pre": "gpt-2"}) == []


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [("gpt2", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2"), ("qwen35", "qwen35")],
)
def test_architecture_decides_on_the_split_if_its_models_agree(architecture: str, pre: str) -> None:
    settings = byte_level_settings(eos_token_id=0) | {"general.architecture": architecture}
    assert tokens_of(settings) == tokens_of(settings | {"tokenizer.ggml.pre": pre})
    assert tokens_of(settings) != DEFAULT_SPLIT
    assert tokenizer_notes(settings) == []


@pytest.mark.parametrize(
    ("pre", "like"),
    [("glm4", "dbrx"), ("chatglm-bpe", "dbrx"), ("exaone4", "gpt-2"), ("olmo", "gpt-2")],
)
def test_split_with_another_name_equals_the_first(pre: str, like: str) -> None:
    settings = byte_level_settings(eos_token_id=0)
    due = tokens_of(settings | {"tokenizer.ggml.pre": like})
    assert tokens_of(settings | {"tokenizer.ggml.pre": pre}) == due
    others = {"dbrx", "gpt-2", "qwen2"} - {like}
    assert all(tokens_of(settings | {"tokenizer.ggml.pre": other}) != due for other in others)


def test_several_templates_keep_their_names() -> None:
    settings = byte_level_settings()
    assert "chat_template" not in tokenizer_settings(settings, 9)
    settings["tokenizer.chat_template"] = "one"
    assert tokenizer_settings(settings, 9)["chat_template"] == "one"
    settings["tokenizer.chat_template.tool_use"] = "two"
    assert tokenizer_settings(settings, 9)["chat_template"] == [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "two"},
    ]


def test_types_and_scores_may_be_left_out() -> None:
    given = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b"]}
    settings = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    assert build_tokenizer(settings).encode("ab").ids == [1, 3, 4, 5]


def test_merges_of_a_long_token_take_memory_for_one_cut_at_a_time() -> None:
    long = "a" * 4000
    given = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "aa", long]}
    settings = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    tracemalloc.start()
    tokenizer = build_tokenizer(settings)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1 << 20  # all cuts of the token have 16 MB
    assert tokenizer.encode("aaa").ids == [1, 3, 5, 4]


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
        ({"model": "rwkv"}, "kind 'rwkv'; served are gpt2, llama, gemma4, bert, t5"),
        ({"model": None}, "kind None"),
        ({"pre": "nowhere"}, "like 'nowhere' \\(tokenizer.ggml.pre\\), which is not served"),
        ({"tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "has no tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "needs 3 numbers in tokenizer.ggml.token_type"),
        ({"merges": ["ab"]}, "the merge 'ab', which names no two tokens"),
        ({"merges": ["a x"]}, "cannot be used"),
        ({"model": "llama", "scores": [0.0]}, "needs 3 numbers in tokenizer.ggml.scores"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"model": "gpt2", "tokens": ["a", "b", "c"], "token_type": [1, 1, 1], **changes}
    settings = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    with pytest.raises(ConfigError, match=words):
        build_tokenizer(settings)


def byte_tokens(pre: str) -> dict[str, Any]:
    """Return the settings of a vocabulary of single bytes, without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    settings = {"model": "gpt2", "pre": pre, "tokens": alphabet, "token_type": [1] * 256}
    return {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


@pytest.mark.parametrize(("pre", "is_composed"), [("qwen2", True), ("gpt-2", False)])
def test_only_tokenizers_like_qwen2_compose_characters(pre: str, is_composed: bool) -> None:
    """Their tokenizer.json has the normalizer NFC."""
    built = build_tokenizer(byte_tokens(pre))
    composed, apart = built.encode("\u00e9").ids, built.encode("e\u0301").ids
    assert (len(composed), len(apart)) == (2, 2 if is_composed else 3)
    assert (composed == apart) is is_composed


def test_gpt2_splits_words_with_their_space_and_endings() -> None:
    """Radford et al. 2019, encoder.py of the release."""
    splitter = build_tokenizer(byte_tokens("gpt-2")).pre_tokenizer
    assert splitter is not None
    pieces = splitter.pre_tokenize_str("We'll  see it's 1234 \u00bd!? DON'T\n\n x")
    assert [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece, _ in pieces] == [
        "We", "'ll", " ", " see", " it", "'s", " 1234", " \u00c2\u00bd", "!?", " DON", "'", "T",
        "\n\n", " x",
    ]  # fmt: skip


def unigrams(tokens: list[str]) -> dict[str, Any]:
    count = len(tokens)
    given = {
        "tokens": tokens,
        "token_type": [1] * count,
        "scores": [-float(i) for i in range(count)],
    }
    settings = {"model": "llama", "unknown_token_id": 0, **given}
    return {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


def test_token_beyond_the_longest_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"a token of {LONGEST_TOKEN + 1} characters; at most"):
        build_tokenizer(unigrams(["a", "b" * (LONGEST_TOKEN + 1)]))
    build_tokenizer(unigrams(["a", "b" * LONGEST_TOKEN]))


def test_merges_of_too_many_characters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens `a`, `aa`, … can each be made of all shorter ones."""
    tokens = ["a" * length for length in range(1, 40)]
    monkeypatch.setattr(tokenizer, "MAX_MERGES", 10_000)
    with pytest.raises(ConfigError, match="in too many ways: the pairs have over 10000"):
        build_tokenizer(unigrams(tokens))
    build_tokenizer(unigrams(tokens[:20]))


def test_lists_may_be_longer_than_the_tokens_and_not_shorter() -> None:
    given = unigrams(["<unk>", "▁", "a", "b", "ab"])
    given |= {"tokenizer.ggml.token_type": [1] * 4 + [USER, USER]}
    longer = given | {"tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0, 9.0]}
    assert build_tokenizer(longer).encode("ab").ids == [1, 4]
    for key in ("token_type", "scores"):
        with pytest.raises(ConfigError, match=f"needs 5 numbers in tokenizer.ggml.{key}"):
            build_tokenizer(given | {f"tokenizer.ggml.{key}": [1] * 4})


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_token_without_merges_is_whole_in_tokenizers_like_llama3(pre: str, is_whole: bool) -> None:
    settings = byte_tokens(pre)
    settings["tokenizer.ggml.tokens"] = [*settings["tokenizer.ggml.tokens"], "abc"]
    settings["tokenizer.ggml.token_type"] = [1] * 257
    settings["tokenizer.ggml.add_bos_token"] = False
    ids = build_tokenizer(settings).encode("abc").ids
    assert ids == [256] if is_whole else len(ids) == 3


def test_merges_of_a_token_are_in_the_order_of_their_first_id() -> None:
    built = build_tokenizer(unigrams(["a", "ab", "c", "bc", "abc", "b"]))
    merges = json.loads(built.to_str())["model"]["merges"]
    assert merges == [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]


def test_first_token_of_a_merge_may_begin_with_a_space() -> None:
    given = {"model": "gpt2", "tokens": [" ", "x", "y", " x", " xy"], "merges": ["  x", " x y"]}
    built = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in given.items()})
    merges = json.loads(built.to_str())["model"]["merges"]
    assert merges == [[" ", "x"], [" x", "y"]]


def test_text_that_looks_like_a_byte_token_is_not_one() -> None:
    given = unigrams(["<unk>", "▁", *"<0x61>", "<0x61>", "<0x62>"])
    given["tokenizer.ggml.token_type"][-2:] = [BYTE, BYTE]
    built = build_tokenizer(given)
    assert built.encode("<0x61>").ids == [1, 1, 2, 3, 4, 5, 6, 7]
    assert built.encode("b").ids == [1, 1, 9]


def test_marks_are_parts_of_words_in_the_split_of_qwen_3_5() -> None:
    """An accent that no letter takes up stays a character of its own after NFC."""
    pieces = {}
    for pre in ("qwen2", "qwen35"):
        tokenizer = build_tokenizer(byte_level_settings(eos_token_id=0, pre=pre))
        split: Any = tokenizer.pre_tokenizer
        pieces[pre] = [place for _, place in split.pre_tokenize_str("xq\u0301s 12\u0301")]
    assert pieces["qwen35"] == [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert pieces["qwen2"] == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8)]


def test_split_of_qwen_3_5_is_that_of_transformers() -> None:
    code = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    assert code.PRETOKENIZE_REGEX == QWEN35
