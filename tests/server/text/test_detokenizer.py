"""Streamed text equals the text of decoding all ids, for every family and any grouping of ids."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.support.reference_data import (
    BYTE_LEVEL,
    LLAMA,
    UNIGRAM,
    WORDPIECE,
    hard_texts,
    located,
    reference,
)
from tests.support.thorough import examples

BYTE_FALLBACK = [
    LLAMA,
    reference("tokenizers/llama2"),
    reference("checkpoints/stories260K-llama"),
]
OTHERS = [
    WORDPIECE,
    UNIGRAM,
    reference("tokenizers/bert-uncased"),
    reference("tokenizers/t5"),
]
BYTE_LEVELS = [BYTE_LEVEL, reference("tokenizers/gpt2"), reference("tokenizers/qwen2.5")]
FIRST_BYTE = 3  # the id of <0x00> in all byte-fallback vocabularies
MORE_TEXTS = ["👋🏽 family 👨‍👩‍👧‍👦 flags 🇩🇪", "নমস্কার ሰላም ༀམ", "a\ufffdb \ufffd", " . n't ' ##x"]


@pytest.fixture(scope="module", params=BYTE_LEVELS + BYTE_FALLBACK + OTHERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(located(request.param))


@pytest.fixture(scope="module", params=BYTE_FALLBACK)
def byte_fallback(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(located(request.param))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return hard_texts() + MORE_TEXTS


def stream(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()


@pytest.mark.parametrize("skip", [True, False])
def test_stream_vector_texts_equals_decode(
    tokenizer: Tokenizer, texts: list[str], skip: bool
) -> None:
    for text in texts:
        ids = tokenizer.encode(text)
        assert stream(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=examples(150))
@given(text=st.text(max_size=60), skip=st.booleans())
def test_stream_any_text_equals_decode(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=examples(400))
@given(data=st.data(), skip=st.booleans())
def test_stream_any_ids_equals_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Low ids are special tokens and single bytes, so partial characters are frequent. The highest
    ids lie outside the vocabulary."""
    anywhere = st.integers(0, tokenizer.vocab_size + 1)
    one = st.one_of(st.integers(0, 270), st.sampled_from(sorted(tokenizer.special_ids)), anywhere)
    ids = data.draw(st.lists(one, max_size=40))
    assert stream(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=examples(300))
@given(
    parts=st.lists(
        st.one_of(st.binary(max_size=5), st.text(max_size=2).map(str.encode), st.just(b"special")),
        max_size=8,
    )
)
def test_stream_any_byte_runs_equals_decode(byte_fallback: Tokenizer, parts: list[bytes]) -> None:
    """Valid and invalid runs of bytes, with special and ordinary tokens between them."""
    word = byte_fallback.encode("a", add_special_tokens=False)
    ids: list[int] = []
    for part in parts:
        ids += [2] if part == b"special" else [FIRST_BYTE + byte for byte in part]
        ids += word * (len(part) % 2)
    for skip in (True, False):
        whole = byte_fallback.decode(ids, skip_special_tokens=skip)
        assert stream(byte_fallback, ids, skip) == whole


def test_push_returns_all_text_that_is_certain(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Only an unfinished character or an unfinished run of byte tokens is held back."""
    for text in texts:
        if "\ufffd" in text:
            continue
        ids = tokenizer.encode(text)
        detokenizer, emitted = Detokenizer(tokenizer), ""
        for count, token_id in enumerate(ids, 1):
            emitted += detokenizer.push(token_id)
            if token_id not in tokenizer.byte_values and token_id not in tokenizer.special_ids:
                assert emitted == tokenizer.decode(ids[:count]).rstrip("\ufffd")


@pytest.mark.parametrize("family", [BYTE_LEVEL, reference("tokenizers/gpt2")])
def test_push_partial_character_returns_nothing(family: str) -> None:
    tokenizer = load_tokenizer(located(family))
    ids = tokenizer.encode("👋.")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids] == [*[""] * (len(ids) - 2), "👋", "."]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_push_run_of_byte_tokens_returns_it_with_the_next_token(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback)
    ids = byte_fallback.encode("a👋y", add_special_tokens=False)
    assert [detokenizer.push(i) for i in ids] == ["a", "", "", "", "", "👋y"]


@pytest.mark.parametrize("family", [*BYTE_FALLBACK, *OTHERS])
def test_detokenizer_continuing_a_prompt_keeps_leading_space(family: str) -> None:
    """Decoding all ids strips the first space, but after a prompt it is part of the text."""
    tokenizer = load_tokenizer(located(family))
    ids = tokenizer.encode("the day", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, continues=True)
    texts = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(texts) + detokenizer.flush() == " the day"
    assert stream(tokenizer, ids) == "the day"


@pytest.mark.parametrize("family", [BYTE_LEVEL, reference("tokenizers/qwen2.5")])
def test_stream_skips_special_tokens_unless_disabled(family: str) -> None:
    qwen = load_tokenizer(located(family))
    ids = qwen.encode("Hi<|im_end|>\n<|endoftext|>")
    assert stream(qwen, ids) == "Hi\n"
    assert stream(qwen, ids, skip=False) == "Hi<|im_end|>\n<|endoftext|>"


def test_stream_invalid_bytes_takes_linear_time(tokenizer: Tokenizer) -> None:
    """A decoding window that grows with the invalid bytes would take minutes here."""
    invalid = [*tokenizer.byte_values] or [
        i for i in range(256) if "\ufffd" in tokenizer.token_text(i)
    ]
    ids = ([max(invalid, default=100)] * 200_000)[: 200_000 if invalid else 1000]
    started = time.monotonic()
    text = stream(tokenizer, ids)
    assert time.monotonic() - started < 20
    assert not invalid or text == "\ufffd" * len(ids)
