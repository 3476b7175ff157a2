"""LFM2 with experts against transformers: sigmoids, a bias for the choice, dense first layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.lfm2_moe import Lfm2Moe
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    accounts_for_tensors,
    chunked_prefill,
    full_prefill,
    golden_tests,
    of_transformers,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Lfm2MoeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7,
        "tie_word_embeddings": False,
    }
    return Lfm2MoeConfig(**(small | overrides))


def biased(config: Any, folder: Path) -> Any:
    """Return the reference with different biases of the experts, and small scores of others."""

    def prepare(model: Any) -> None:
        for layer in model.model.layers[config.num_dense_layers :]:
            bias = layer.feed_forward.expert_bias
            bias.copy_(bias.new_tensor([0.6, -0.4, 0.0, 0.2, 0.9, -0.7]))

    return of_transformers(config, folder, prepare=prepare)


CASE = Case(
    "lfm2-moe",
    config,
    reference=biased,
    without={"num_experts_per_tok": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    zeroed=["expert_bias", "feed_forward.gate", "experts.4.w2", "feed_forward.w2"],
)
OTHERS = [
    Case(
        "unbiased",
        lambda: config(use_expert_bias=False, norm_topk_prob=False, tie_word_embeddings=True),
    ),
    Case("all-layers", lambda: config(num_dense_layers=0, routed_scaling_factor=1.0)),
]


@golden_tests([CASE], quick=(full_prefill, chunked_prefill, accounts_for_tensors))
def test_lfm2_moe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(OTHERS, [full_prefill])
def test_lfm2_moe_variants_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": None},
        {"num_dense_layers": -1},
        {"num_experts_per_tok": 7},
        {"routed_scaling_factor": 0},
    ],
    ids=str,
)
def test_lfm2_moe_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Lfm2Moe.read_config(config().to_dict() | wrong)
