"""GPT-2 against transformers: Conv1D weights, learned positions, all spellings of tensor names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.gpt2 import GPT2
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GPT2Config

    small = {"vocab_size": 211, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}
    return GPT2Config(**(small | overrides))


def without_prefix(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the prefix of tensor names, as in OpenAI's own files."""
    for name in [name for name in tensors if name.startswith("transformer.")]:
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def with_masks(config: dict[str, Any], tensors: Tensors) -> None:
    """Add causal masks as buffers of several dtypes, with and without the prefix."""
    size = config["n_positions"]
    for layer in range(config["n_layer"]):
        tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, size, size).tril()
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, size, size, dtype=torch.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


PARTS = [
    *("wpe", "attn.c_attn.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias"),
    *("ln_1.weight", "ln_1.bias", "ln_2.bias", "ln_f.bias"),
]
CASES = [
    Case("prefix", config, zeroed=PARTS),
    Case("no-prefix-inner", lambda: config(n_inner=96), edit=without_prefix),
    Case("gelu", lambda: config(activation_function="gelu")),
    Case("relu", lambda: config(activation_function="relu")),
    Case("untied", lambda: config(tie_word_embeddings=False), zeroed=["lm_head"]),
]


@golden_tests(CASES)
def test_gpt2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(
    [
        Case("masks", config, edit=with_masks),
        Case("tanh-name", lambda: config(activation_function="gelu_pytorch_tanh")),
        Case("sharded", config, shard_size="40KB"),
        Case(
            "epsilon", lambda: config(layer_norm_epsilon=0.5), without={"layer_norm_epsilon": 1e-5}
        ),
    ],
    [full_prefill],
)
def test_gpt2_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"activation_function": "silu"}, "activation_function = 'silu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"n_head": 5}, "n_embd 48, which is not divisible by 5"),
        ({"n_embd": 0}, "n_embd = 0"),
        ({"n_inner": -1}, "n_inner = -1"),
        ({"n_positions": None}, "lacks 'n_positions'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_gpt2_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        GPT2(given, max_positions=128, dtype=torch.float32)
