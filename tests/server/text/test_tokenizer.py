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
from server.text.load_tokenizer import load_tokenizer
from server.text.special_tokens import FLAGS
from server.text.tokenizer import Tokenizer
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
from tests.support.thorough import examples

NAMES = ("gpt2", "qwen2.5", "llama2", "bert-uncased", "t5")
PUBLISHED = [reference(f"tokenizers/{name}") for name in NAMES]
FAMILIES = [BYTE_LEVEL, WORDPIECE, UNIGRAM, *CHECKPOINTS, *PUBLISHED]
NORMALISING = ("wordpiece", "unigram", "bert-uncased", "t5")  # tokens differ from the text


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return located(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A copy of a checkpoint's tokenizer files that the test may change."""
    for file in located(LLAMA).glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; the value None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_encode_and_decode_hard_texts_equal_transformers(
    folder: Path, tokenizer: Tokenizer
) -> None:
    path = str(folder / "tokenizer.json")
    transformers = PreTrainedTokenizerFast(tokenizer_file=path, clean_up_tokenization_spaces=False)
    transformers.backend_tokenizer.no_truncation()
    transformers.backend_tokenizer.no_padding()
    for text in [*hard_texts(), "", "</s> [SEP] <|im_end|>x"]:
        ids = tokenizer.encode(text)
        assert ids == transformers.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == transformers.decode(
                ids, skip_special_tokens=skip
            )


def test_encode_text_that_begins_with_bos_has_one_bos() -> None:
    tokenizer = load_tokenizer(located(LLAMA))
    assert tokenizer.encode("<s>Once") == tokenizer.encode("<s>Once", add_special_tokens=False)
    assert tokenizer.encode("<s>") == [1]


def test_encode_with_lowercase_leaves_special_tokens_as_they_are() -> None:
    """As transformers' own normalizer: each letter by itself, so a last sigma is not special."""
    plain = load_tokenizer(located(BYTE_LEVEL))
    lower = load_tokenizer(located(BYTE_LEVEL), lowercase=True)
    assert lower.encode("How DO I") == plain.encode("how do i") != plain.encode("How DO I")
    assert lower.encode("ΑΣ") == plain.encode("ασ")
    words = load_tokenizer(located(WORDPIECE), lowercase=True)
    assert words.encode("A [SEP] B") == load_tokenizer(located(WORDPIECE)).encode("a [SEP] b")
    assert words.encode("A [SEP] B").count(words.token_id("[SEP]")) == 2


def test_encode_long_and_short_texts_never_truncates_or_pads(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("a b c d e f g h i j " * 100)) > 1000
    assert len(tokenizer.encode("a")) < 5


def test_encode_ignores_truncation_and_padding_of_tokenizer_json(tmp_path: Path) -> None:
    """The tokenizer.json of a sentence encoder often sets both."""
    shutil.copyfile(located(WORDPIECE) / "tokenizer.json", tmp_path / "tokenizer.json")
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
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("tree " * 20)) == 22
    assert len(tokenizer.encode("tree")) == 3


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
    if folder.name in NORMALISING:
        return
    seen = ""
    for token, start, end in zip(ids, offsets, [*offsets, len(text)][1:], strict=True):
        seen += text[start:end]
        piece = tokenizer.token_bytes(token).decode(errors="replace")
        if start < end and "\ufffd" not in piece:
            assert text[start:end].strip(" ") == piece.strip(" ")
    assert seen == text[: len(seen)]
    assert len(seen) == (len(text) if ids else 0)


@pytest.mark.parametrize("most", [3, 4, 7, 13, 500])
@pytest.mark.parametrize("name", [WORDPIECE, reference("tokenizers/bert-uncased")])
def test_encode_part_equals_truncation_in_transformers(name: str, most: int) -> None:
    folder = located(name)
    transformers = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.added_tokens == 2
    for text in hard_texts():
        expected = transformers(text, truncation=True, max_length=most).input_ids
        assert tokenizer.encode_part(text, most) == expected


def test_bos_token_id_without_any_source_is_none(stories: Path) -> None:
    assert load_tokenizer(stories).bos_token_id == 1
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change(stories / name, bos_token=None)
    change(stories / "generation_config.json", bos_token_id=None)
    change(stories / "config.json", bos_token_id=None)
    assert load_tokenizer(stories).bos_token_id is None


def test_defaults_contain_set_values_and_refuse_bad_ones(stories: Path) -> None:
    assert load_tokenizer(stories).defaults == {}
    file = stories / "generation_config.json"
    change(file, temperature=1, top_k=20.0, do_sample=False, max_length=20, repetition_penalty=1.1)
    defaults = load_tokenizer(stories).defaults
    assert defaults == {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1}
    assert isinstance(defaults["temperature"], float)
    assert isinstance(defaults["top_k"], int)
    odd = [{"top_k": 1.5}, {"temperature": "hot"}, {"top_p": True}]
    odd += [{name: float(value)} for name in ("top_k", "top_p") for value in ("inf", "nan")]
    odd += [{"min_p": 1.5}, {"top_p": -0.1}, {"repetition_penalty": 0}, {"temperature": -1}]
    for wrong in [*odd, {"top_k": 10**300}]:
        change(file, **dict.fromkeys(SAMPLING_DEFAULTS, 1) | wrong)
        with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(wrong))}"):
            load_tokenizer(stories)


def test_decode_ids_outside_vocabulary_gives_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([10**6]) == tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""


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
@pytest.mark.variants(2)
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


@pytest.mark.variants(4)
def test_encode_from_several_threads_gives_equal_ids(tokenizer: Tokenizer) -> None:
    texts = hard_texts() * 4
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tokenizer.encode, texts)) == expected


@pytest.mark.parametrize("direction", ["encode", "decode"])
async def test_off_loop_long_text_does_not_block_event_loop(model: Path, direction: str) -> None:
    """A thread alone is not enough: a call that holds the GIL blocks the event loop too."""
    tokenizer = load_tokenizer(model)
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
        load_tokenizer(stories)


def test_from_folder_decoder_that_cannot_stream_raises(stories: Path) -> None:
    change(stories / "tokenizer.json", decoder={"type": "BPEDecoder", "suffix": "</w>"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder \['BPEDecoder'\]"):
        load_tokenizer(stories)


def test_from_folder_vocabulary_larger_than_model_raises(stories: Path) -> None:
    change(stories / "config.json", vocab_size=500)
    with pytest.raises(ConfigError, match=r"12 tokens beyond vocab_size = 500 .* id 511"):
        load_tokenizer(stories)
    change(stories / "config.json", vocab_size=200)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 312 tokens beyond .* = 200"):
        load_tokenizer(stories)


def test_from_folder_long_token_beyond_the_model_is_clipped(stories: Path) -> None:
    tokens = [{"id": 9000, "content": "Q" * 4000, **dict.fromkeys(FLAGS, False)}]
    change(stories / "tokenizer.json", added_tokens=tokens)
    with pytest.raises(ConfigError, match=r"tokens beyond vocab_size = 512 .* up to 'QQQ") as error:
        load_tokenizer(stories)
    assert len(str(error.value)) < 600


def test_from_folder_vocabulary_smaller_than_model_loads(stories: Path) -> None:
    change(stories / "config.json", vocab_size=None, text_config={"vocab_size": 576})
    assert load_tokenizer(stories).vocab_size == 512
    change(stories / "config.json", text_config={"vocab_size": 511})
    with pytest.raises(ConfigError, match="beyond vocab_size = 511"):
        load_tokenizer(stories)


def test_from_folder_special_token_beyond_vocab_size_loads(stories: Path) -> None:
    """Gemma 3's text checkpoints contain such a token: the image token."""
    content = json.loads((stories / "tokenizer.json").read_text())
    token = {**content["added_tokens"][0], "id": 512, "content": "<image>"}
    change(stories / "tokenizer.json", added_tokens=[*content["added_tokens"], token])
    assert load_tokenizer(stories).encode("<image>")[-1] == 512
    change(stories / "tokenizer.json", added_tokens=[{**token, "special": False}])
    with pytest.raises(ConfigError, match="'<image>' with id 512"):
        load_tokenizer(stories)
