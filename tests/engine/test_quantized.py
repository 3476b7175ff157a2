"""Engines with quantised weights: answers do not depend on the batch, chunks or the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.numba.codes import has_instructions
from engine.layers.linear import Linear
from engine.memory.model_plan import ModelPlan
from engine.ops.codes import Quantization
from engine.runner import fill_weights
from engine.runner.load import load_engine
from tests.support.driver import Driver, tiny_llama

KINDS: list[Quantization] = ["int8", "int4"]
COUNT = 24
SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_model_len": 192}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "model"
    return tiny_llama(folder, hidden_size=64, intermediate_size=96)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(600) for _ in range(40)]
    return [
        (stem[: rng.randrange(40)] + [rng.randrange(600) for _ in range(60)])[
            : rng.randrange(5, 90)
        ]
        for _ in range(12)
    ]


def params(number: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": number} if number % 3 else {"temperature": 0}


def answers(driver: Driver, together: bool) -> list[list[int]]:
    ids = []
    for number, prompt in enumerate(prompts()):
        ids.append(driver.submit(prompt, COUNT, **params(number)))
        if not together:
            driver.run()
    driver.run()
    return [driver.tokens(request) for request in ids]


@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_equal_alone_together_chunked_and_preempted(
    model: Path, kind: Quantization
) -> None:
    mode: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "auto", "block_size": 16}
    fields = {"quantization": kind, **mode}
    alone = answers(Driver(model, enable_prefix_caching=False, **fields), together=False)
    assert len({token for answer in alone for token in answer}) > 50
    plain = answers(Driver(model, **mode), together=False)
    assert alone != plain, "the weights are rounded"
    roomy = Driver(model, **fields)
    assert answers(roomy, together=True) == alone
    assert answers(roomy, together=True) == alone, "with prefix hits"
    small = Driver(model, max_num_seqs=8, **SMALL, **fields)
    assert answers(small, together=True) == alone
    assert small.stats.preemptions > 0


@pytest.mark.parametrize("kind", [*KINDS, "fp8"])
def test_planned_bytes_are_those_that_are_measured(model: Path, kind: Quantization) -> None:
    config = EngineConfig(
        model=str(model), quantization=kind, device="cpu", dtype="bfloat16", threads=1
    )
    loaded = load_engine(config)
    entries = {entry.name: entry for entry in loaded.facts.memory}
    has_codes = has_instructions() and kind != "fp8"
    name = f"{kind} weights" if has_codes else "weights in oneDNN's layout"
    for entry in (entries["weights"], entries[name]):
        assert entry.planned == entry.measured
    assert loaded.facts.quantization == (kind if has_codes else None)


def test_layers_are_quantized_while_others_are_not_read_yet(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight layers, only those of a block whose tensors are being read are plain at once."""
    pack, counts = fill_weights._pack, []

    def counted(plan: ModelPlan, layer: nn.Module) -> None:
        linears = [each for each in plan.module.modules() if isinstance(each, Linear)]
        weights = [each.weight for each in linears if each.weight is not None]
        counts.append(sum(not weight.is_meta for weight in weights))
        pack(plan, layer)

    monkeypatch.setattr(fill_weights, "_pack", counted)
    driver = Driver(model, quantization="int4")
    linears = [each for each in driver.runner.model.modules() if isinstance(each, Linear)]
    assert len(linears) == 8
    assert all(each.weight is None for each in linears)
    assert 1 <= max(counts) <= 4


def test_in_fp32_the_weights_are_rounded_only(model: Path) -> None:
    fields = {"dtype": "float32", "enable_prefix_caching": False}
    rounded = Driver(model, quantization="int8", **fields)
    layer = rounded.runner.model.blocks[0].attention.qkv
    plain = Driver(model, **fields).runner.model.blocks[0].attention.qkv
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    difference = (layer(x) - plain(x)).norm() / plain(x).norm()
    assert 1e-3 < difference < 2e-2


def test_quantization_without_packing_is_refused(model: Path) -> None:
    config = EngineConfig(model=str(model), quantization="int8", device="cpu", prepack=False)
    with pytest.raises(ConfigError, match="--quantization needs a CPU"):
        ModelPlan(config)
