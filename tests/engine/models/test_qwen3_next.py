"""Qwen3-Next against transformers: gated delta nets, gated attention, and a shared expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.recurrent import CausalConv
from engine.models.qwen3_next import Qwen3Next
from engine.ops.gated import silu
from tests.support.delta_rule import without
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    accounts_for_tensors,
    chunked_prefill,
    full_prefill,
    golden_tests,
    prefix_hit,
    unnormalised,
)
from tests.support.single_steps import single_steps

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Qwen3NextConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-2,  # the gated norm would magnify the rounding of small reads
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    return Qwen3NextConfig(**(small | overrides))


def of_own_input(self: CausalConv, x: torch.Tensor, *states: Any) -> torch.Tensor:
    """Stand-in for CausalConv.forward that forgets the inputs before each token's own."""
    return silu(x * self.weight[:, 0, -1])


def ungated(x: torch.Tensor, gate: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """Stand-in for operations that multiply by a function of a gate."""
    return x


DELTA = "engine.layers.gated_delta_net."
ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
CASE = Case(
    "delta",
    config,
    without={"rope_parameters": ROTATED, "norm_topk_prob": False},
    zeroed=["A_log", "dt_bias", "conv1d", "linear_attn.norm", "shared_expert.down", "expert_gate"],
    replaced={
        f"{DELTA}CausalConv.forward": of_own_input,
        "engine.layers.norm.gated_rms_norm": ungated,
        "engine.layers.attention.sigmoid_mul": ungated,
        "engine.layers.attention.RotaryAttention.forward": unnormalised,
    },
    reference=single_steps,
)
PARTS = ("normalises", "decays", "weighs_writes")
# The same checkpoint; a feature is removed by one name, and these have the same.
RULES = [
    Case(f"rule-{part}", config, replaced={f"{DELTA}gated_delta": without(part)}) for part in PARTS
]


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Spell the config as in the checkpoints of Qwen, with a drafter that is not served."""
    del config["layer_types"]
    rope = config.pop("rope_parameters")
    config |= {
        "full_attention_interval": 2,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None,
    }
    tensors["mtp.fc.weight"] = torch.ones(2, 2)


def dense_and_biased() -> Any:
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    return config(
        mlp_only_layers=[1],
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope,
        linear_num_key_heads=4,
        linear_conv_kernel_dim=3,
    )


SPELLINGS = [
    Case("published", lambda: config(rope_theta=1e6), as_published, reference=single_steps),
    Case("dense-biased", dense_and_biased, reference=single_steps),
]


@golden_tests([CASE], quick=[full_prefill, chunked_prefill, prefix_hit, accounts_for_tensors])
def test_qwen3_next_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(RULES, [])
def test_qwen3_next_needs_each_part_of_the_rule(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_qwen3_next_variants_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["mamba"] * 3},
        {"layer_types": ["linear_attention"] * 3},
        {"linear_conv_kernel_dim": 1},
        {"linear_num_value_heads": 3},
        {"linear_key_head_dim": 0},
        {"attn_output_gate": False},
        {"num_experts_per_tok": 7},
    ],
    ids=str,
)
def test_qwen3_next_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Qwen3Next.read_config(config().to_dict() | wrong)
