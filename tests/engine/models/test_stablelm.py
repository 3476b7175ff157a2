"""StableLM against transformers: parallel residual, a LayerNorm for each head, partial rotary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.norm import HeadLayerNorm
from engine.models.stablelm import StableLM
from tests.support.golden import (
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    greedy,
    numba,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import StableLmConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    }
    return StableLmConfig(**(small | overrides))


def rope(share: float, **more: Any) -> dict[str, Any]:
    default = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    return default | more


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and leave out what has defaults."""
    parameters = config.pop("rope_parameters")
    config |= {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor")}
    for key in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual", "tie_word_embeddings"):
        del config[key]


def not_centred(self: HeadLayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Stand-in for HeadLayerNorm.forward that takes no mean away."""
    normed = torch.nn.functional.rms_norm(x, (self.head_dim,), eps=self.eps)
    return normed * self.weight.view(-1, self.head_dim)


def with_shared_weight(self: HeadLayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Stand-in for HeadLayerNorm.forward that takes the weight of the first head for all."""
    weight = self.weight[: self.head_dim]
    return torch.nn.functional.layer_norm(x, (self.head_dim,), weight, eps=self.eps)


FORWARD = "engine.layers.norm.HeadLayerNorm.forward"
CASE = Case(
    "parallel",
    config,
    without={"rope_parameters": rope(0.5), "layer_norm_eps": 10.0},
    zeroed=["q_layernorm", "k_layernorm", "q_proj.bias", "input_layernorm.bias", "norm.bias"],
    replaced={FORWARD: not_centred},
)
SEQUENTIAL = Case(
    "sequential",
    lambda: config(use_parallel_residual=False, qk_layernorm=False, num_key_value_heads=6),
    zeroed=["post_attention_layernorm.bias"],
)
PLAIN = {"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False}
SPELLINGS = [
    Case(
        "as-released",
        lambda: config(**PLAIN, rope_parameters=rope(0.5, rope_theta=500.0)),
        edit=as_released,
        without={"partial_rotary_factor": None, "rope_theta": 1e4},
    ),
    Case("tied", lambda: config(tie_word_embeddings=True), replaced={FORWARD: with_shared_weight}),
    Case("one-kv-head", lambda: config(num_key_value_heads=1, rope_parameters=rope(1.0))),
]


@golden_tests([CASE])
def test_stablelm_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([SEQUENTIAL], [full_prefill, greedy, numba], quick=[full_prefill])
def test_stablelm_sequential_blocks_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_stablelm_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"head_dim": 16}, "head_dim = 16"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"num_attention_heads": 5}, "hidden_size 48, which is not divisible by 5"),
        ({"layer_norm_eps": None}, "lacks 'layer_norm_eps'"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ],
    ids=str,
)
def test_stablelm_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        StableLM.read_config(config().to_dict() | wrong)
