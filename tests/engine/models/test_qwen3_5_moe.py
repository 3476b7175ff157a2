"""Qwen3.5 with experts against transformers: their tensors, one by one or all in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.qwen3_5_moe import Qwen35Moe
from tests.engine.models.test_qwen3_5 import IMAGE_TOKEN, SMALL, inside, seeing_fields
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    accounts_for_tensors,
    full_prefill,
    golden_tests,
    refusal,
)
from tests.support.qwen_images import shown, vision_inputs
from tests.support.seeing import check_images
from tests.support.single_steps import single_steps

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 6


MIXTURE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": COUNT,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}


def config(**overrides: Any) -> Any:
    from transformers import Qwen3_5MoeTextConfig

    small = SMALL | MIXTURE
    del small["intermediate_size"]
    return Qwen3_5MoeTextConfig(**(small | overrides))


def seeing() -> Any:
    from transformers import Qwen3_5MoeConfig

    return Qwen3_5MoeConfig(**seeing_fields(**MIXTURE))


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Put the model into a multimodal one, and all experts of a layer into two tensors."""
    inside(config, tensors)
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    for layer in range(config["text_config"]["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(COUNT)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}down_proj"] = down


CASE = Case("experts", config, zeroed=["shared_expert.down", "expert_gate"], reference=single_steps)
PUBLISHED = Case("published", config, as_published, reference=single_steps)
SEEING = Case("seeing", seeing, reference=single_steps)


@golden_tests([CASE], quick=[full_prefill, accounts_for_tensors])
def test_qwen3_5_moe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([PUBLISHED], [full_prefill])
def test_qwen3_5_moe_published_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [SEEING], indirect=True, ids=lambda case: case.name)
def test_qwen3_5_moe_with_images_matches_transformers(golden: Golden) -> None:
    stories = [[], [shown(3, 5, 0)], [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)]]
    check_images(golden, stories, IMAGE_TOKEN, vision_inputs, types=True)


@pytest.mark.parametrize("golden", [PUBLISHED], indirect=True)
def test_missing_fused_experts_are_named(golden: Golden) -> None:
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    assert f"lack {name}." in refusal(golden, lambda _, t: t.pop(name))


@pytest.mark.parametrize("golden", [PUBLISHED], indirect=True)
def test_fused_experts_with_a_single_one_are_refused(golden: Golden) -> None:
    name = "model.language_model.layers.1.mlp.experts.3.down_proj.weight"
    assert name in refusal(golden, lambda _, tensors: tensors.update({name: torch.ones(48, 32)}))


@pytest.mark.parametrize("golden", [PUBLISHED], indirect=True)
def test_fused_experts_of_another_number_are_refused(golden: Golden) -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-1].clone()

    assert f"{COUNT} experts" in refusal(golden, edit)


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_topk_prob": False},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"num_experts_per_tok": 7},
    ],
    ids=str,
)
def test_qwen3_5_moe_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Qwen35Moe.read_config(config().to_dict() | wrong)
