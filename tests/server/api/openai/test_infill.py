"""`suffix` of completions: prompts for fill-in-the-middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import tokenizers

from server.generation.infill import FORMATS, infill_tokens
from server.text.load_tokenizer import tokenizer_of
from tests.server.conftest import BOS, EOS, byte_tokenizer, write_model
from tests.support.fake_engine import INFO, FakeEngine, Script
from tests.support.rig import Served, serving

BEFORE, SUFFIX, MIDDLE, END = range(258, 262)


@pytest.fixture
async def coder(tmp_path: Path, says: Callable[[str], Script]) -> AsyncIterator[Served]:
    """A server whose model knows fill-in-the-middle."""
    folder = write_model(tmp_path / "coder")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([*FORMATS[0], "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    info = msgspec.structs.replace(INFO, vocab_size=262)
    async with serving(FakeEngine(says("x"), info=info), folder) as running:
        yield running


async def test_suffix_makes_a_prompt_for_fill_in_the_middle(
    coder: Served, encode: Callable[[str], list[int]]
) -> None:
    answer = await coder.complete(prompt=["def", "d"], suffix="return")
    assert answer.status_code == 200
    prompts = [request.prompt for request in coder.engine.requests]
    tail = [SUFFIX, *encode("return"), MIDDLE]
    assert prompts == [[BOS, BEFORE, *encode("def"), *tail], [BOS, BEFORE, *encode("d"), *tail]]
    assert coder.engine.requests[-1].params.stop_token_ids == (EOS, END)
    await coder.complete(prompt="d", suffix="r", ignore_eos=True)
    assert coder.engine.requests[-1].params.stop_token_ids == ()


async def test_empty_suffix_is_no_suffix(coder: Served, encode: Callable[[str], list[int]]) -> None:
    await coder.complete(prompt="def", suffix="")
    assert coder.engine.requests[-1].prompt == [BOS, *encode("def")]
    assert coder.engine.requests[-1].params.stop_token_ids == (EOS,)


async def test_suffix_that_cannot_be_used_is_refused(coder: Served) -> None:
    cases = [
        {"prompt": [1, 2]},
        {"prompt": "a", "echo": True},
        {"prompt": ["a"] * 2000, "suffix": "b" * 20_000},  # 40 MB in all
    ]
    for fields in cases:
        answer = await coder.complete(**{"suffix": "x"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


async def test_suffix_without_infill_tokens_is_refused(served: Served) -> None:
    answer = await served.complete(suffix="x")
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "fill-in-the-middle" in error["message"]


@pytest.mark.parametrize("names", FORMATS, ids=str)
def test_infill_tokens_finds_each_format(names: tuple[str, str, str], tmp_path: Path) -> None:
    backend = byte_tokenizer()
    assert infill_tokens(tokenizer_of(backend, tmp_path)) is None
    backend.add_special_tokens(list(names[:2]))
    assert infill_tokens(tokenizer_of(backend, tmp_path)) is None, "one is missing"
    backend.add_special_tokens(list(names[2:]))
    found = infill_tokens(tokenizer_of(backend, tmp_path))
    assert found is not None
    assert (found.before, found.suffix, found.middle, found.end_ids) == (*names, ())


def test_infill_tokens_that_a_text_cannot_contain_are_none(tmp_path: Path) -> None:
    vocab = {"a": 0, **{name: n for n, name in enumerate(FORMATS[0], 1)}}
    model = tokenizers.models.BPE(vocab=vocab, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = byte_tokenizer().decoder
    assert infill_tokens(tokenizer_of(backend, tmp_path)) is None
