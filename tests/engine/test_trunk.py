"""Decoders that make vectors of texts: families, batches, blocks, what is not loaded, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.memory.trunk_plan import SPARE_TEXTS
from engine.protocol.lens import LensRequest
from tests.engine.models import (
    test_deepseek_v2,
    test_gemma2,
    test_gemma4,
    test_gpt2,
    test_gpt_oss,
    test_lfm2,
    test_phi3,
    test_qwen3_moe,
)
from tests.support.driver import EAGER, Driver, each
from tests.support.encoders import in_float64
from tests.support.golden import Case, Golden, load
from tests.support.ranks import ranked
from tests.support.sentence_folder import Dense, sentence_folder
from tests.support.tiny_qwen3 import tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")
BACKENDS = ("numba", "torch")
HOT = 644  # a token that occurs only in texts with NaN


def texts(count: int, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(HOT, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("checkpoints") / "qwen3")


def vectors(driver: Driver, given: list[list[int]]) -> torch.Tensor:
    ids = [driver.embed(text) for text in given]
    driver.run()
    return torch.stack([driver.vector(number) for number in ids])


FAMILIES = {
    "windows and softcaps": test_gemma2.CASE,
    "layers that read the KV of others": test_gemma4.CASE,
    "sinks and experts": test_gpt_oss.CASE,
    "latent attention": test_deepseek_v2.LITE,
    "learned positions": test_gpt2.CASES[0],
    "experts": test_qwen3_moe.CASE,
    "fused weights": test_phi3.CASE,
}


# tests/e2e/test_sentence_folders.py has a quick case.
@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_embed_vectors_of_a_family_equal_the_states_of_the_reference(
    case: Case, tmp_path: Path
) -> None:
    golden = Golden(case, tmp_path)
    reference = in_float64(golden.reference)
    with torch.inference_mode():
        states = [
            reference(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
            for text in golden.prompts
        ]
    for budget, pooling in ((1, "last"), (1000, "mean")):
        driver = Driver(tmp_path, pooling=pooling, block_size=16, max_num_encoder_tokens=budget)
        found = vectors(driver, golden.prompts)
        due = torch.stack([state[-1] if pooling == "last" else state.mean(0) for state in states])
        # transformers' own rounding in fp32 is up to 5e-6 of the largest number.
        largest = max(1.0, due.abs().max().item())
        torch.testing.assert_close(found.double(), due, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("mode", each(EAGER | {"torch": {"attention_backend": "torch"}}))
def test_embed_in_batch_equals_alone_bitwise(qwen3: Path, mode: dict[str, Any]) -> None:
    driver = Driver(qwen3, pooling="last", block_size=16, max_num_encoder_tokens=300, **mode)
    crowd = texts(24)
    found = vectors(driver, crowd)
    for vector, text in zip(found, crowd, strict=True):
        assert torch.equal(vectors(driver, [text])[0], vector)


def test_embed_many_short_texts_take_several_parts_of_one_step(qwen3: Path) -> None:
    """Each has a block of its own, and a step has room for fewer."""
    driver = Driver(qwen3, pooling="mean", block_size=128, max_num_encoder_tokens=500)
    crowd = [[token] for token in range(3 * SPARE_TEXTS)]
    found = vectors(driver, crowd)
    assert len({tuple(vector.tolist()) for vector in found}) == len(crowd)
    for number in (0, SPARE_TEXTS, len(crowd) - 1):
        assert torch.equal(vectors(driver, [crowd[number]])[0], found[number])


@pytest.mark.parametrize("backend", BACKENDS)
def test_embed_nan_of_one_text_stays_out_of_later_ones(qwen3: Path, backend: str) -> None:
    """A later text takes the blocks that have NaN."""
    driver = Driver(qwen3, pooling="last", attention_backend=backend)
    crowd = texts(6, 30)
    before = vectors(driver, crowd)
    driver.runner.model.embed.weight.data[HOT] = float("nan")  # type: ignore[attr-defined]
    broken = driver.embed([HOT] * 60)
    driver.run()
    assert driver.embeddings[broken].finish == "error"
    assert torch.equal(vectors(driver, crowd), before)


def test_trunk_needs_no_head_and_no_beginning_of_names(qwen3: Path, tmp_path: Path) -> None:
    """A head in the file is not loaded; any other surplus tensor is refused."""
    due = vectors(Driver(qwen3, pooling="last"), texts(3))
    bare = tiny_qwen3(tmp_path / "bare", begins="")
    assert torch.equal(vectors(Driver(bare, pooling="last"), texts(3)), due)
    untied = tiny_qwen3(tmp_path / "untied", tie_word_embeddings=False)
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = torch.ones(645, 16)
    save_file(tensors, untied / "model.safetensors")
    driver = Driver(untied, pooling="last")
    assert torch.equal(vectors(driver, texts(3)), due)
    assert driver.core.facts.parameters == sum(
        t.numel() for t in load_file(qwen3 / "model.safetensors").values()
    )
    tensors["model.surplus.weight"] = torch.ones(1)
    save_file(tensors, untied / "model.safetensors")
    with pytest.raises(ConfigError, match="surplus"):
        load(untied, pooling="last")


def test_decoder_makes_vectors_only_if_its_files_or_the_flag_say_so(
    qwen3: Path, tmp_path: Path
) -> None:
    assert Driver(qwen3).core.facts.kind == "decoder"
    facts = Driver(qwen3, pooling="last").core.facts
    assert (facts.kind, facts.embedding_size, facts.num_blocks) == ("encoder", 16, 0)
    bare = tiny_qwen3(tmp_path / "bare", begins="")
    assert Driver(bare).core.facts.kind == "encoder"


def test_trunk_shows_its_attention_in_the_lens(qwen3: Path) -> None:
    driver = Driver(qwen3, pooling="last")
    driver.inbox.append(LensRequest(1, [3, 4, 5], positions=(2,), layers=(0, 1)))
    driver.run()
    (result,) = [m for m in driver.sent if type(m).__name__ == "LensResult"]
    assert not result.error


@pytest.mark.slow
def test_two_ranks_embed_like_one(tmp_path: Path) -> None:
    """Each has its heads of the KV, and the whole of a Dense module."""
    plain = tiny_qwen3(tmp_path / "plain")
    folder = sentence_folder(plain, tmp_path / "st", {"pooling_mode": "mean"}, Dense(16, 5))
    due = vectors(Driver(folder), texts(8))
    with ranked(folder, tmp_path / "ranks", max_num_encoder_tokens=100) as driver:
        assert (vectors(driver, texts(8)) - due).norm() <= 1e-5 * due.norm()


def edited(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_trunk_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    both_sides = edited(tiny_qwen3(tmp_path / "both"), is_causal=False)
    with pytest.raises(ConfigError, match="is_causal = false"):
        load(both_sides, pooling="mean")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8"):
        load(tiny_qwen3(tmp_path / "coded"), pooling="mean", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="--lora-modules"):
        load(tmp_path / "coded", pooling="mean", max_loras=1)


@pytest.mark.slow
def test_trunk_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    Golden(test_lfm2.CASE, tmp_path)
    with pytest.raises(ConfigError, match="recurrent"):
        load(tmp_path, pooling="mean")
