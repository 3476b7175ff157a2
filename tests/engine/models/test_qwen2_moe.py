"""Qwen2 with experts against transformers: a gated shared expert, and a layer without experts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen2_moe import Qwen2Moe
from tests.support.golden import (
    WINDOW,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Qwen2MoeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "max_position_embeddings": 128,
    }
    return Qwen2MoeConfig(**(small | overrides))


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of the published checkpoints."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["sliding_window"] = 32768
    for key in ("layer_types", "qkv_bias", "mlp_only_layers"):
        del config[key]


CASE = Case(
    "shared",
    config,
    without={"norm_topk_prob": True},
    zeroed=[
        "experts.3.gate_proj",
        "mlp.gate.weight",
        "mlp.shared_expert.up_proj",
        "shared_expert_gate",
        "q_proj.bias",
    ],
)
SPELLINGS = [
    Case(
        "published",
        lambda: config(mlp_only_layers=[], rope_parameters={"rope_theta": 500.0}),
        edit=published,
    ),
    Case(
        "every-second",
        lambda: config(mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=True),
    ),
    Case("no-bias", lambda: config(qkv_bias=False, tie_word_embeddings=True)),
    Case(
        "windowed",
        lambda: config(use_sliding_window=True, sliding_window=WINDOW),
        without={"layer_types": ["full_attention"] * 3},
    ),
    Case(
        "windowed-by-default",
        lambda: config(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
        edit=lambda config, tensors: config.pop("layer_types"),
        without={"max_window_layers": 0},
    ),
]


@golden_tests([CASE])
def test_qwen2_moe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_qwen2_moe_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_experts_per_tok": 6}, "only 5 experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ({"max_window_layers": "x"}, "max_window_layers = 'x'"),
        ({"layer_types": ["sliding_attention"] * 3}, "without a sliding_window"),
    ],
    ids=str,
)
def test_qwen2_moe_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Qwen2Moe.read_config(config().to_dict() | wrong)
