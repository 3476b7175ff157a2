"""Engines with mixtures of experts: answers do not depend on the batch, also with codes."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.experts import ExpertLinear
from engine.memory.check_kernels import check_kernels
from engine.memory.report import PACKED_WEIGHTS
from engine.offline.quantize.command import quantize_folder
from engine.ops.codes import Quantization
from tests.engine.models.test_qwen3_moe import config
from tests.support.driver import Driver
from tests.support.golden import of_transformers

SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_model_len": 120}
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("experts")
    of_transformers(config(**WIDE, tie_word_embeddings=False), folder)
    return folder


def answers(driver: Driver, *, together: bool) -> list[list[int]]:
    draw = random.Random(3)
    requests = []
    for number in range(8):
        prompt = [draw.randrange(211) for _ in range(draw.randrange(1, 80))]
        sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        requests.append(driver.submit(prompt, 16, **sampled))
        if not together:
            driver.run()
    driver.run()
    return [driver.tokens(request) for request in requests]


@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_answers_are_equal_alone_together_and_preempted(
    model: Path, kind: Quantization | None
) -> None:
    shared: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "numba"}
    alone = answers(Driver(model, **shared, quantization=kind), together=False)
    driver = Driver(model, **shared, quantization=kind, **SMALL, max_num_seqs=8)
    assert answers(driver, together=True) == alone
    assert len({token for answer in alone for token in answer}) > 20


def test_memory_table_counts_the_experts_codes(model: Path) -> None:
    sizes = {}
    for kind in (None, "int8"):
        driver = Driver(model, dtype="bfloat16", attention_backend="numba", quantization=kind)
        plan = driver.loaded.plan
        entries = {entry.name: entry for entry in driver.loaded.facts.memory}
        packed = entries[f"{kind} weights" if kind else PACKED_WEIGHTS]
        assert packed.measured == packed.planned == plan.packed_bytes
        sizes[kind] = plan.packed_bytes
    assert sizes["int8"] < 0.6 * sizes[None]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_folder_keeps_the_experts_codes_and_a_plain_router(
    model: Path, kind: str, tmp_path: Path
) -> None:
    layers = quantize_folder(str(model), tmp_path / "out", kind)
    assert "model.layers.0.mlp.gate" in layers.ignored
    assert "model.layers.0.mlp.experts.4.down_proj.weight" in layers.rounded
    shared: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "numba"}
    driver = Driver(tmp_path / "out", **shared)
    experts = [
        each for each in driver.loaded.plan.module.modules() if isinstance(each, ExpertLinear)
    ]
    assert [each.tensors.stored_form.bits for each in experts] == [int(kind[3:])] * 4
    assert answers(driver, together=True) == answers(
        Driver(tmp_path / "out", **shared), together=False
    )


@pytest.mark.parametrize(("kind", "said"), [("int8", "no kernel for codes"), (None, "triton")])
def test_what_a_gpu_cannot_compute_is_refused(kind: Quantization | None, said: str) -> None:
    experts = ExpertLinear.__new__(ExpertLinear)
    nn.Module.__init__(experts)
    plan: Any = SimpleNamespace(
        config=EngineConfig(model="demo"),
        device=torch.device("cuda"),
        kernels="torch" if kind is None else "triton",
        module=experts,
        packs=True,
        rounds_to=kind,
    )
    with pytest.raises(ConfigError, match=said):
        check_kernels(plan)
