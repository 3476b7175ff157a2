"""The ids, bytes and texts of the tokens of each kind of vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.text.load_tokenizer import load_tokenizer
from tests.support.reference_data import (
    BYTE_LEVEL,
    CHECKPOINTS,
    LLAMA,
    UNIGRAM,
    WORDPIECE,
    hard_texts,
    located,
    reference,
)

VECTORS = "tokenizer-vectors/ggml-vocab-"
WAVE = [bytes([byte]) for byte in "👋".encode()]


@pytest.mark.parametrize("name", [BYTE_LEVEL, LLAMA])
def test_encode_hard_texts_gives_the_ids_of_llama_cpp(name: str) -> None:
    tokenizer = load_tokenizer(located(name))
    found = [tokenizer.encode(text, add_special_tokens=False) for text in hard_texts()]
    assert found == json.loads((located(name) / "ids.json").read_text())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        reference("tokenizers/gpt2", "gpt-2"),
        reference("tokenizers/llama2", "llama-spm"),
        reference("tokenizers/bert-uncased", "bert-bge"),
    ],
)
def test_encode_llama_cpp_vectors_gives_their_ids(name: str, family: str) -> None:
    tokenizer = load_tokenizer(located(name))
    lines = located(f"{VECTORS}{family}.gguf.out").read_text().splitlines()
    texts = hard_texts(f"{VECTORS}{family}.gguf.inp")
    assert len(texts) == 46
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token) for token in line.split()], text


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_encode_and_decode_golden_checkpoints_give_expected_values(name: str) -> None:
    tokenizer = load_tokenizer(located(name))
    for case in json.loads((located(name) / "expected.json").read_text())["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize(
    ("name", "size"), [(BYTE_LEVEL, 645), (LLAMA, 512), reference("tokenizers/qwen2.5", 151665)]
)
def test_vocab_size_covers_added_tokens(name: str, size: int) -> None:
    assert load_tokenizer(located(name)).vocab_size == size


@pytest.mark.parametrize(
    ("family", "text", "pieces"),
    [
        (BYTE_LEVEL, " 👋 é", [b" \xf0\x9f\x91", b"\x8b", b" \xc3", b"\xa9"]),
        (BYTE_LEVEL, "a<|im_end|><tool_call>", [b"a", b"<|im_end|>", b"<tool_call>"]),
        (LLAMA, "👋", [b" ", *WAVE]),
        (LLAMA, "the tree</s>", [b" the", b" tre", b"e", b"</s>"]),
        (WORDPIECE, "unaffable.", [b" un", b"aff", b"able", b"."]),
        (UNIGRAM, "the day", [b" the", b" day"]),
        reference("tokenizers/gpt2", "Hi 👋 é", [b"Hi", b" \xf0\x9f\x91", b"\x8b", b" \xc3\xa9"]),
        reference("tokenizers/qwen2.5", "a<|im_end|>", [b"a", b"<|im_end|>"]),
        reference("tokenizers/llama2", "the end</s>", [b" the", b" end", b"</s>"]),
        reference("tokenizers/bert-uncased", "unaffable.", [b" una", b"ffa", b"ble", b"."]),
        reference("tokenizers/t5", "the end", [b" the", b" end"]),
    ],
)
def test_token_bytes_in_every_family_match_the_text(
    family: str, text: str, pieces: list[bytes]
) -> None:
    tokenizer = load_tokenizer(located(family))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == pieces


@pytest.mark.parametrize(
    ("name", "first"),
    [
        (BYTE_LEVEL, 0),
        (LLAMA, 3),
        reference("tokenizers/gpt2", 0),
        reference("tokenizers/llama2", 3),
    ],
)
def test_token_bytes_of_byte_tokens_cover_every_byte(name: str, first: int) -> None:
    tokenizer = load_tokenizer(located(name))
    found = [tokenizer.token_bytes(i) for i in range(first, first + 256)]
    assert sorted(found) == [bytes([byte]) for byte in range(256)]
    assert first == 0 or found == sorted(found)


@pytest.mark.parametrize("name", [BYTE_LEVEL, reference("tokenizers/gpt2")])
def test_token_text_of_partial_character_is_replacement_character(name: str) -> None:
    tokenizer = load_tokenizer(located(name))
    texts = [tokenizer.token_text(i) for i in tokenizer.encode(" 👋")]
    assert texts == [" \ufffd", "\ufffd"]


def test_token_text_of_byte_token_is_its_character_or_replacement_character() -> None:
    llama = load_tokenizer(located(LLAMA))
    assert llama.token_text(3 + 0xE5) == "\ufffd"
    assert llama.token_text(3 + 0x0A) == "\n"


def test_token_bytes_of_added_token_outside_byte_alphabet_are_utf8(
    tmp_path: Path,
) -> None:
    content = json.loads((located(BYTE_LEVEL) / "tokenizer.json").read_text())
    added = {**content["added_tokens"][0], "id": 645, "content": "<｜tool▁call 1｜>"}
    content["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.token_bytes(645) == added["content"].encode()
    assert tokenizer.decode([645], skip_special_tokens=False) == added["content"]
