"""How texts are split, for every name that llama.cpp knows: the pieces are those of llama.cpp.

The pieces are those of libllama (`tests/support/gguf_splits.py`). Where llama.cpp only comes close
to a model's tokenizer.json, the split is the model's.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise

import pytest

from engine.checkpoint.gguf.pre_tokenizers import NAMED, REFUSED, SPACED, SPLITS
from engine.checkpoint.gguf.tokenizer import build_tokenizer
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_splits import pieces
from tests.engine.checkpoint.gguf.test_tokenizer import byte_tokens
from tests.support.gguf_splits import ANSWERS, TEXTS

DUE = json.loads(ANSWERS.read_text())
FIRST = [names.split()[0] for names, _ in NAMED]
# Texts that llama.cpp splits in another way than the model: it does not know the case of letters,
# or of letters beyond ASCII, nor marks; it takes U+3000 for another space, and numbers in threes
# together with what is in front.
SPACES = ("1234567  12 3 4567",)
CASES, CASED_ACCENTS = ("CamelCase HTTPServer iOS", "ABCdefGHI123jkl"), ("ÉCOLE École ÀÉa éÀ",)
MARKS = ("na\u0308ive e\u0301a", "ไทย ລາວ မြန်", "हिन्दी में १२३")
DIFFERENT: dict[str, tuple[str, ...]] = {
    "tekken": MARKS + CASED_ACCENTS,
    "gpt-4o": MARKS + CASED_ACCENTS,
    "granite-embed-multi-97m": CASED_ACCENTS,
    "kimi-k2": CASES + MARKS + CASED_ACCENTS,
    "youtu": CASES + CASED_ACCENTS,
    "tiny_aya": CASES + CASED_ACCENTS + ("12345abc 1,234,567.8", "2024年12月, 3日!") + SPACES,
    "afmoe": SPACES,
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), ("x\u00a0y\u3000z\u2003w",)),
}


@pytest.mark.parametrize("name", FIRST)
def test_pieces_of_texts_are_those_of_llama_cpp(name: str) -> None:
    for text, lengths in zip(TEXTS, DUE[name], strict=True):
        ends = accumulate(map(int, lengths.split()), initial=0)
        due = [text[start:end] for start, end in pairwise(ends)]
        assert (pieces(name, text) == due) == (text not in DIFFERENT.get(name, ())), text


def test_texts_tell_all_splits_apart() -> None:
    """Two are another spelling of an earlier one."""
    equal = {"granite-embed-multi-97m", "bailingmoe"}
    found = [[pieces(name, text) for text in TEXTS] for name in FIRST if name not in equal]
    assert all(found.count(each) == 1 for each in found)


@pytest.mark.parametrize(
    ("name", "text", "due"),
    [
        ("gpt-4o", "iPhone ÉCOLE I'll", ["i", "Phone", " ÉCOLE", " I'll"]),
        ("tekken", "na\u0308ive ÀÉa", ["na\u0308ive", " ÀÉa"]),
        ("kimi-k2", "CamelCase漢字ab", ["Camel", "Case", "漢字", "ab"]),
        ("youtu", "ABCdefGHI 12", ["ABCdef", "GHI", " ", "1", "2"]),
        ("tiny_aya", "1234567 12345abc", ["1", "234", "567", " ", "123", "45", "abc"]),
    ],
)
def test_splits_that_llama_cpp_only_comes_close_to_are_the_models(
    name: str, text: str, due: list[str]
) -> None:
    assert pieces(name, text) == due


def test_every_name_of_llama_cpp_is_served_or_refused_with_its_reason() -> None:
    assert len({*SPLITS, *SPACED, *REFUSED}) == 91  # in the source of llama.cpp 0c1e57098
    for name, reason in REFUSED.items():
        with pytest.raises(ConfigError, match=f"'{name}'.*{reason}"):
            build_tokenizer(byte_tokens(name))
    with pytest.raises(ConfigError, match="'no-such-split'"):
        build_tokenizer(byte_tokens("no-such-split"))


def test_kimi_k2_without_merges_is_refused() -> None:
    with pytest.raises(ConfigError, match="merges"):
        build_tokenizer(byte_tokens("kimi-k2") | {"tokenizer.ggml.merges": []})
