"""LFM2 against transformers: short convolutions, whose state is kept, and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.layers.recurrent import CausalConv
from engine.models.lfm2 import Lfm2
from engine.scheduling.state_slots import least_slots
from tests.support.golden import (
    EQUALITIES,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    unnormalised,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Lfm2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "block_multiple_of": 16,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "tie_word_embeddings": False,
    }
    return Lfm2Config(**(small | overrides))


def of_own_input(self: CausalConv, x: torch.Tensor, *states: Any) -> torch.Tensor:
    """Stand-in for CausalConv.forward that forgets the inputs before each token's own."""
    return x * self.weight[:, 0, -1]


CASE = Case(
    "convolutions",
    config,
    zeroed=["conv.conv", "operator_norm", "ffn_norm"],
    replaced={
        "engine.layers.recurrent.CausalConv.forward": of_own_input,
        "engine.layers.attention.RotaryAttention.forward": unnormalised,
    },
)


def without_theta(config: dict[str, Any], tensors: Tensors) -> None:
    del config["rope_parameters"]


BIASES = Case(
    "biases-tied",
    lambda: config(conv_bias=True, conv_L_cache=4, tie_word_embeddings=True),
    without_theta,
)


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Spell the config as in the checkpoints of LiquidAI."""
    config["full_attn_idxs"] = [2, 4]
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"] = config.pop("tie_word_embeddings")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["layer_types"]


@golden_tests([CASE], quick=EQUALITIES)
def test_lfm2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("golden", [CASE], ids=["convolutions"], indirect=True)
def test_lfm2_keeps_no_more_states_than_blocks_on_a_cpu(golden: Golden) -> None:
    runner = golden.runner
    assert runner.kv.states is not None
    slots = len(runner.kv.states[0][0]) - 1
    assert slots == least_slots(8) + runner.kv.num_blocks


@golden_tests([BIASES, Case("published", config, as_published)], [full_prefill])
def test_lfm2_spellings_match_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["mamba"] * 5},
        {"layer_types": ["conv"] * 5},
        {"full_attn_idxs": 2},
        {"full_attn_idxs": ["2"]},
        {"conv_L_cache": 0},
        {"conv_L_cache": 1},
        {"hidden_act": "relu"},
    ],
    ids=str,
)
def test_lfm2_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Lfm2.read_config(config().to_dict() | wrong)
