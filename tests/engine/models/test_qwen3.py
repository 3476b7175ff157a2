"""Qwen3 against transformers: per-head norms of queries and keys, an independent head_dim."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.qwen3 import Qwen3
from tests.support.golden import (
    EQUALITIES,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    golden_tests,
    unnormalised,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import Qwen3Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return Qwen3Config(**(small | overrides))


SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CASE = Case(
    "biases",
    lambda: config(attention_bias=True),
    zeroed=["q_norm", "k_norm", "q_proj.bias", "o_proj.bias"],
    replaced={"engine.layers.attention.RotaryAttention.forward": unnormalised},
)
SLIDES = Case(
    "slides-tied",
    lambda: config(**SLIDING, tie_word_embeddings=True),
    without={"layer_types": ["full_attention"] * 3},
    lengths=WINDOW_LENGTHS,
)


@golden_tests([CASE])
def test_qwen3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([SLIDES], [*EQUALITIES, window_is_exact])
def test_qwen3_sliding_window_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def test_qwen3_missing_head_dim_is_128() -> None:
    pytest.importorskip("transformers")
    silent = config(head_dim=128).to_dict()
    del silent["head_dim"]
    assert Qwen3.read_config(silent).head_dim == 128
