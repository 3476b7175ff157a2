"""EXAONE 4 against transformers: norms after sublayers, global layers without rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.layers.attention import RotaryAttention
from engine.models.exaone4 import Exaone4
from engine.models.llama import LlamaConfig, llama_attention
from tests.support.golden import (
    EQUALITIES,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    unnormalised,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL = ["full_attention"] * 3


def config(**overrides: Any) -> Any:
    from transformers import Exaone4Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
    return Exaone4Config(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of EXAONE-4.0-32B."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config |= {"rope_scaling": scaling, "sliding_window_pattern": "LLLG"}
    del config["tie_word_embeddings"]


def by_period(config: dict[str, Any], tensors: Tensors) -> None:
    del config["layer_types"]


def rotated(config: LlamaConfig, index: int) -> RotaryAttention:
    """Stand-in for llama_attention with rotary embedding in each layer."""
    return llama_attention(replace(config, rotates=(True,) * config.layers), index)


CASE = Case(
    "hybrid",
    config,
    without={"layer_types": FULL, "sliding_window": 1000},
    zeroed=["q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    replaced={
        "engine.layers.attention.RotaryAttention.forward": unnormalised,
        "engine.models.exaone4.llama_attention": rotated,
    },
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case(
        "as-released",
        lambda: config(rope_parameters=LLAMA3),
        edit=as_released,
        without={"rope_scaling": None, "rope_theta": 1e4},
    ),
    Case("by-period", config, edit=by_period, without={"sliding_window_pattern": 3}),
    Case(
        "no-window, tied",
        lambda: config(sliding_window=None, layer_types=FULL, tie_word_embeddings=True),
        without={"sliding_window": 1000},
    ),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_exaone4_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_exaone4_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [("LLLG", [0, 1, 2, 4, 5]), ("LG", [0, 2, 4]), ("L", [0, 1, 2, 3, 4, 5]), (3, [0, 1, 3, 4, 6])],
    ids=str,
)
def test_exaone4_pattern_without_layer_types_has_a_global_last_layer(
    pattern: str | int, windowed: list[int]
) -> None:
    """transformers documents letters, but reads them only together with `layer_types`."""
    pytest.importorskip("transformers")
    given = config(num_hidden_layers=7).to_dict()
    found = Exaone4.read_config(given | {"layer_types": None, "sliding_window_pattern": pattern})
    windows = [WINDOW if index in windowed else None for index in range(7)]
    assert list(found.windows) == windows
    assert list(found.rotates) == [window is not None for window in windows]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        (
            {"layer_types": None, "sliding_window_pattern": "LLXG"},
            "sliding_window_pattern = 'LLXG'",
        ),
        ({"layer_types": None, "sliding_window_pattern": ""}, "sliding_window_pattern = ''"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({"layer_types": FULL[:2]}, "layer_types"),
        ({"sliding_window": None}, "without a sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
    ids=str,
)
def test_exaone4_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Exaone4.read_config(config().to_dict() | wrong)
