"""DeepSeek-V2 against transformers: latent attention, experts in groups, shared experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.deepseek_v2 import DeepseekV2
from tests.support.golden import (
    TOLERANCE,
    Case,
    Equality,
    Golden,
    full_prefill,
    golden_tests,
    last_logits,
    load,
    prefix_hit,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


def config(**overrides: Any) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**(SIZES | {"topk_method": "group_limited_greedy"} | overrides))


def published(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Spell the config as published checkpoints do, with keys that change nothing."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    del config["head_dim"], config["qk_head_dim"]
    config |= {"moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}
    name = config["architectures"][0]
    config["auto_map"] = {"AutoModelForCausalLM": f"modeling_deepseek.{name}"}


GROUPS = Case(
    "groups",
    config,
    without={"topk_method": "greedy", "topk_group": 4, "routed_scaling_factor": 1.0},
    zeroed=["shared_experts", "kv_a_layernorm", "q_a_layernorm", "mlp.gate.weight"],
    replaced={"engine.layers.latent.apply_rotary_pairs": lambda x, cos, sin, kernels: x},
)
LITE = Case(
    "lite",
    lambda: config(q_lora_rank=None, topk_method="greedy", rope_parameters=YARN, v_head_dim=20),
    edit=published,
    replaced={
        "engine.models.deepseek_v2._yarn_scale": lambda scaling: 1.0,
        "engine.layers.rotary._yarn_factor": lambda scaling: 1.0,
    },
)


@golden_tests([GROUPS], quick=[full_prefill, prefix_hit])
def test_deepseek_v2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([LITE], quick=[full_prefill])
def test_deepseek_v2_lite_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [GROUPS], indirect=True)
def test_plain_weights_of_heads_match_packed_ones(golden: Golden) -> None:
    """As on a GPU, which packs no plain weights."""
    logits = last_logits(golden, load(golden.folder, prepack=False))
    torch.testing.assert_close(logits, golden.logits, **TOLERANCE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"qk_head_dim": 64}, "qk_head_dim"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 23}, "head_dim"),
        ({"n_group": 3}, "n_group 3"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"topk_group": 1}, "num_experts_per_tok 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"n_shared_experts": None}, "n_shared_experts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_deepseek_v2_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        DeepseekV2.read_config(config().to_dict() | wrong)
