"""The tokenizer equals llama.cpp's test vectors, transformers, and the golden checkpoints."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.errors import ConfigError
from server.generation.off_loop import off_loop
from server.text.generation_config import SAMPLING_DEFAULTS
from server.text.tokenizer import Tokenizer
from tests.support.thorough import examples

FAMILIES = [f"tokenizers/{name}" for name in ("gpt2", "qwen2.5", "llama2", "bert-uncased", "t5")]
CHECKPOINTS = ["checkpoints/stories260K-llama", "checkpoints/stories280K-gpt2"]
VECTORS = {"gpt-2": "gpt2", "llama-spm": "llama2", "bert-bge": "bert-uncased"}


@pytest.fixture(scope="module", params=FAMILIES + CHECKPOINTS)
def folder(request: pytest.FixtureRequest, assets: Path) -> Path:
    return assets / request.param


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def stories(assets: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint's tokenizer files that the test may change."""
    for file in (assets / CHECKPOINTS[0]).glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; the value None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def vector_texts(assets: Path, name: str = "gpt-2") -> list[str]:
    file = assets / f"tokenizer-vectors/ggml-vocab-{name}.gguf.inp"
    return file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")[:-1]


@pytest.mark.parametrize("name", VECTORS)
def test_encode_llama_cpp_vectors_gives_their_ids(assets: Path, name: str) -> None:
    tokenizer = Tokenizer.from_folder(assets / "tokenizers" / VECTORS[name])
    lines = (assets / f"tokenizer-vectors/ggml-vocab-{name}.gguf.out").read_text().splitlines()
    texts = vector_texts(assets, name)
    assert len(texts) == 46
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(token) for token in line.split()], text


def test_encode_and_decode_vector_texts_equal_transformers(
    folder: Path, tokenizer: Tokenizer, assets: Path
) -> None:
    path = str(folder / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=path, clean_up_tokenization_spaces=False)
    reference.backend_tokenizer.no_truncation()
    reference.backend_tokenizer.no_padding()
    for text in [*vector_texts(assets), "", "</s> [SEP] <|im_end|>x"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_encode_and_decode_golden_checkpoints_give_expected_values(assets: Path, name: str) -> None:
    tokenizer = Tokenizer.from_folder(assets / name)
    for case in json.loads((assets / name / "expected.json").read_text())["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_encode_text_that_begins_with_bos_has_one_bos(assets: Path) -> None:
    tokenizer = Tokenizer.from_folder(assets / CHECKPOINTS[0])
    assert tokenizer.encode("<s>Once") == tokenizer.encode("<s>Once", add_special_tokens=False)
    assert tokenizer.encode("<s>") == [1]


def test_encode_long_and_short_texts_never_truncates_or_pads(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("a b c d e f g h i j " * 100)) > 1000
    assert len(tokenizer.encode("a")) < 5


def test_encode_ignores_truncation_and_padding_of_tokenizer_json(
    assets: Path, tmp_path: Path
) -> None:
    """The tokenizer.json of a sentence encoder often sets both."""
    for file in (assets / "tokenizers" / "bert-uncased").glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    change(
        tmp_path / "tokenizer.json",
        truncation={
            "direction": "Right",
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode("word " * 20)) == 22
    assert len(tokenizer.encode("word")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello world",
        " Hello  wörld🙂 é日本 x",
        "<s>a </s>b<|endoftext|>c",
        "\n\n\ta  \n",
        "<s><s>a",
    ],
)
def test_offsets_are_where_tokens_begin(tokenizer: Tokenizer, folder: Path, text: str) -> None:
    ids, offsets = tokenizer.encode(text), tokenizer.offsets(text)
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert set(offsets) <= set(range(len(text) + 1))
    if folder.name in ("bert-uncased", "t5"):
        return  # these normalise the text, so tokens differ from its characters
    seen = ""
    for token, start, end in zip(ids, offsets, [*offsets, len(text)][1:], strict=True):
        seen += text[start:end]
        piece = tokenizer.token_bytes(token).decode(errors="replace")
        if start < end and "\ufffd" not in piece:
            assert text[start:end].strip(" ") == piece.strip(" ")
    assert seen == text[: len(seen)]
    assert len(seen) == (len(text) if ids else 0)


@pytest.mark.parametrize("most", [3, 4, 7, 13, 500])
def test_encode_part_equals_truncation_in_transformers(assets: Path, most: int) -> None:
    folder = assets / "tokenizers" / "bert-uncased"
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.added_tokens == 2
    for text in vector_texts(assets):
        expected = reference(text, truncation=True, max_length=most).input_ids
        assert tokenizer.encode_part(text, most) == expected


def test_bos_token_id_without_any_source_is_none(stories: Path) -> None:
    assert Tokenizer.from_folder(stories).bos_token_id == 1
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change(stories / name, bos_token=None)
    change(stories / "generation_config.json", bos_token_id=None)
    change(stories / "config.json", bos_token_id=None)
    assert Tokenizer.from_folder(stories).bos_token_id is None


def test_defaults_contain_set_values_and_refuse_bad_ones(stories: Path) -> None:
    assert Tokenizer.from_folder(stories).defaults == {}
    file = stories / "generation_config.json"
    change(file, temperature=1, top_k=20.0, do_sample=False, max_length=20, repetition_penalty=1.1)
    defaults = Tokenizer.from_folder(stories).defaults
    assert defaults == {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1}
    assert isinstance(defaults["temperature"], float)
    assert isinstance(defaults["top_k"], int)
    odd = [{"top_k": 1.5}, {"temperature": "hot"}, {"top_p": True}]
    odd += [{name: float(value)} for name in ("top_k", "top_p") for value in ("inf", "nan")]
    odd += [{"min_p": 1.5}, {"top_p": -0.1}, {"repetition_penalty": 0}, {"temperature": -1}]
    for wrong in [*odd, {"top_k": 10**300}]:
        change(file, **dict.fromkeys(SAMPLING_DEFAULTS, 1) | wrong)
        with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(wrong))}"):
            Tokenizer.from_folder(stories)


def test_vocab_size_covers_added_tokens(assets: Path) -> None:
    assert Tokenizer.from_folder(assets / "tokenizers/qwen2.5").vocab_size == 151665
    assert Tokenizer.from_folder(assets / CHECKPOINTS[0]).vocab_size == 512


def test_decode_ids_outside_vocabulary_gives_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([10**6]) == tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""


def test_token_bytes_in_every_family_match_the_text(assets: Path) -> None:
    def pieces(family: str, text: str) -> list[bytes]:
        tokenizer = Tokenizer.from_folder(assets / family)
        return [tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    wave = "👋".encode()
    assert pieces("tokenizers/gpt2", "Hi 👋 é") == [b"Hi", b" \xf0\x9f\x91", b"\x8b", b" \xc3\xa9"]
    assert pieces("tokenizers/qwen2.5", "a<|im_end|>") == [b"a", b"<|im_end|>"]
    assert pieces(CHECKPOINTS[0], "👋") == [b" ", *(bytes([byte]) for byte in wave)]
    assert pieces("tokenizers/llama2", "the end</s>") == [b" the", b" end", b"</s>"]
    assert pieces("tokenizers/bert-uncased", "unaffable.") == [b" una", b"ffa", b"ble", b"."]
    assert pieces("tokenizers/t5", "the end") == [b" the", b" end"]


def test_token_bytes_of_byte_tokens_cover_every_byte(assets: Path) -> None:
    every = [bytes([byte]) for byte in range(256)]
    gpt2 = Tokenizer.from_folder(assets / "tokenizers/gpt2")
    assert sorted(gpt2.token_bytes(i) for i in range(256)) == every
    llama = Tokenizer.from_folder(assets / "tokenizers/llama2")
    assert [llama.token_bytes(i) for i in range(3, 259)] == every


def test_token_text_of_partial_character_is_replacement_character(assets: Path) -> None:
    tokenizer = Tokenizer.from_folder(assets / "tokenizers/gpt2")
    texts = [tokenizer.token_text(i) for i in tokenizer.encode(" 👋")]
    assert texts == [" \ufffd", "\ufffd"]
    llama = Tokenizer.from_folder(assets / CHECKPOINTS[0])
    assert llama.token_text(3 + 0xE5) == "\ufffd"
    assert llama.token_text(3 + 0x0A) == "\n"


def test_token_bytes_of_added_token_outside_byte_alphabet_are_utf8(
    assets: Path, tmp_path: Path
) -> None:
    shutil.copyfile(assets / "tokenizers/gpt2/tokenizer.json", tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {**content["added_tokens"][0], "id": 50257, "content": "<｜tool▁call 1｜>"}
    change(tmp_path / "tokenizer.json", added_tokens=[*content["added_tokens"], added])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token_bytes(50257) == added["content"].encode()
    assert tokenizer.decode([50257], skip_special_tokens=False) == added["content"]


def test_encode_lone_surrogate_raises_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud83d")


@given(
    parts=st.lists(st.tuples(st.text(min_size=1), st.integers(1, 300)), min_size=1, max_size=5),
    limit=st.integers(100, 125),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=examples(100),
)
def test_far_over_reports_only_texts_over_the_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, parts: list[tuple[str, int]], limit: int
) -> None:
    monkeypatch.setattr("server.text.tokenizer.BEGINNING", 1)
    text = "".join(part * times for part, times in parts) * 4
    if tokenizer.far_over(text, limit):
        assert len(tokenizer.encode(text)) > limit
    assert tokenizer.far_over(text, len(text)) is None


def test_far_over_long_text_counts_only_its_start(tokenizer: Tokenizer) -> None:
    text = "Once upon a time, " * 50_000
    assert tokenizer.far_over(text, 10**6) is None, "the text fits"
    assert tokenizer.far_over(text[:500_000], 1000) is None, "the text is too short to save time"
    assert tokenizer.far_over(text, 1000).endswith(" in its first 262144 characters")


def test_encode_from_several_threads_gives_equal_ids(tokenizer: Tokenizer, assets: Path) -> None:
    texts = vector_texts(assets) * 4
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tokenizer.encode, texts)) == expected


@pytest.mark.parametrize("direction", ["encode", "decode"])
async def test_off_loop_long_text_does_not_block_event_loop(model: Path, direction: str) -> None:
    """A thread alone is not enough: a call that holds the GIL blocks the event loop too."""
    tokenizer = Tokenizer.from_folder(model)
    text = "Once upon a time, " * 50_000
    ids = tokenizer.encode(text, add_special_tokens=False) * 3
    last, longest = time.monotonic(), 0.0

    async def tick() -> None:
        nonlocal last, longest
        while True:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    longest, began = 0.0, time.monotonic()
    if direction == "encode":
        await off_loop(len(text), lambda: tokenizer.encode(text))
    else:
        await off_loop(len(ids), lambda: tokenizer.decode(ids))
    took = time.monotonic() - began
    await asyncio.sleep(0.01)
    ticking.cancel()
    assert longest < took / 2


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", r"Cannot read .*tokenizer\.json"),
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git LFS pointer.* `git lfs pull`"),
        (
            "tokenizer_config.json",
            r'{"bos_token": "\ud800"}',
            r"Cannot read .*tokenizer_config\.json",
        ),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object"),
        ("generation_config.json", "nonsense", r"Cannot read .*generation_config\.json"),
    ],
)
def test_from_folder_broken_file_raises_error_naming_it(
    stories: Path, name: str, content: str | None, problem: str
) -> None:
    (stories / name).unlink()
    if content is not None:
        (stories / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        Tokenizer.from_folder(stories)


def test_from_folder_decoder_that_cannot_stream_raises(stories: Path) -> None:
    change(stories / "tokenizer.json", decoder={"type": "BPEDecoder", "suffix": "</w>"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder \['BPEDecoder'\]"):
        Tokenizer.from_folder(stories)


def test_from_folder_vocabulary_larger_than_model_raises(stories: Path, assets: Path) -> None:
    change(stories / "config.json", vocab_size=500)
    with pytest.raises(ConfigError, match=r"12 tokens beyond vocab_size = 500 .* id 511"):
        Tokenizer.from_folder(stories)
    shutil.copyfile(assets / "tokenizers/llama2/tokenizer.json", stories / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 31500 tokens beyond .* = 500"):
        Tokenizer.from_folder(stories)


def test_from_folder_vocabulary_smaller_than_model_loads(stories: Path) -> None:
    change(stories / "config.json", vocab_size=None, text_config={"vocab_size": 576})
    assert Tokenizer.from_folder(stories).vocab_size == 512
    change(stories / "config.json", text_config={"vocab_size": 511})
    with pytest.raises(ConfigError, match="beyond vocab_size = 511"):
        Tokenizer.from_folder(stories)


def test_from_folder_special_token_beyond_vocab_size_loads(stories: Path) -> None:
    """Gemma 3's text checkpoints contain such a token: the image token."""
    content = json.loads((stories / "tokenizer.json").read_text())
    token = {**content["added_tokens"][0], "id": 512, "content": "<image>"}
    change(stories / "tokenizer.json", added_tokens=[*content["added_tokens"], token])
    assert Tokenizer.from_folder(stories).encode("<image>")[-1] == 512
    change(stories / "tokenizer.json", added_tokens=[{**token, "special": False}])
    with pytest.raises(ConfigError, match="'<image>' with id 512"):
        Tokenizer.from_folder(stories)
