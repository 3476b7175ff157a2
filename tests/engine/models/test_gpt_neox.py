"""GPT-NeoX against transformers: parallel residual, fused interleaved qkv, partial rotary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.gpt_neox import GPTNeoX
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def config(**overrides: Any) -> Any:
    from transformers import GPTNeoXConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
        "rope_parameters": HALF,
    }
    return GPTNeoXConfig(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and the buffers of its files."""
    parameters = config.pop("rope_parameters")
    config["rotary_emb_base"] = parameters["rope_theta"]
    config["rotary_pct"] = parameters["partial_rotary_factor"]
    for key in ("use_parallel_residual", "attention_bias", "tie_word_embeddings"):
        del config[key]
    for layer in range(config["num_hidden_layers"]):
        attention = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{attention}.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
        tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{attention}.rotary_emb.inv_freq"] = torch.rand(2)


def renamed_head(config: dict[str, Any], tensors: Tensors) -> None:
    """Call the head as transformers 5 does in memory."""
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")


BIASES = [
    *("query_key_value.bias", "attention.dense.bias", "dense_h_to_4h.bias", "dense_4h_to_h.bias"),
    *("input_layernorm.bias", "post_attention_layernorm.bias", "final_layer_norm.bias"),
]
CASE = Case(
    "parallel",
    config,
    without={
        "use_parallel_residual": False,
        "rope_parameters": HALF | {"partial_rotary_factor": 1.0},
        "hidden_act": "relu",
    },
    zeroed=BIASES,
)
SEQUENTIAL = Case(
    "sequential",
    lambda: config(use_parallel_residual=False, hidden_act="gelu_fast"),
    without={"use_parallel_residual": True},
)
THETA = HALF | {"rope_theta": 500.0}
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=THETA), edit=as_released),
    Case("renamed-head", config, edit=renamed_head),
    Case("tied", lambda: config(tie_word_embeddings=True)),
    Case("no-bias", lambda: config(attention_bias=False)),
    Case("quarter", lambda: config(num_attention_heads=3, rope_parameters=None)),
    Case("linear", lambda: config(rope_parameters=HALF | {"rope_type": "linear", "factor": 4.0})),
    Case("epsilon", lambda: config(layer_norm_eps=0.5), without={"layer_norm_eps": 1e-5}),
    Case("relu", lambda: config(hidden_act="relu")),
]


@golden_tests([CASE, SEQUENTIAL])
def test_gpt_neox_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_gpt_neox_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"num_attention_heads": 5}, "hidden_size 48, which is not divisible by 5"),
        ({"layer_norm_eps": None}, "lacks 'layer_norm_eps'"),
        ({"rope_parameters": None, "rotary_pct": 0.4}, "even .* not 3"),
        ({"rope_theta": 500.0}, "rope_theta = 500.0"),
        ({"rope_parameters": None, "rotary_pct": "half"}, "partial_rotary_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_gpt_neox_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        GPTNeoX(given, max_positions=128, dtype=torch.float32)
