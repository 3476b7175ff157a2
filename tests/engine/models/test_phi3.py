"""Phi-3 against transformers: fused tensors, longrope, partial rotary, windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.phi3 import Phi3
from tests.support.golden import (
    VISIBLE,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    greedy,
    last_logits,
    load,
    numba,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")
FACTORS = {"short_factor": [1.0, 1.5, 1.2], "long_factor": [1.3, 2.0, 9.0]}  # of 6 dimensions of 8
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
PART = {"partial_rotary_factor": 0.75}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def config(**overrides: Any) -> Any:
    from transformers import Phi3Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }
    return Phi3Config(**(small | overrides))


def longrope(original: int, **more: Any) -> Any:
    scaling = LONGROPE | PART | more
    return config(rope_parameters=scaling, original_max_position_embeddings=original, **PART)


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Spell longrope as Phi-3's first release did."""
    parameters = config.pop("rope_parameters")
    del parameters["rope_type"], parameters["original_max_position_embeddings"]
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters | {"type": "su"}


# All lengths exceed the original one, so that the reference takes the long factors, too.
ORIGINAL, BEYOND = 8, (9, 15, 16, 33, 60)
CASE = Case(
    "longrope",
    lambda: longrope(ORIGINAL),
    without={"rope_parameters": PLAIN_ROPE | PART},
    zeroed=["qkv_proj", "gate_up_proj"],
    lengths=BEYOND,
)
WINDOWED = Case(
    "window",
    lambda: config(
        sliding_window=WINDOW, rope_parameters=PLAIN_ROPE | {"partial_rotary_factor": 0.5}
    ),
    without={"sliding_window": None, "rope_parameters": PLAIN_ROPE},
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case("as-released", lambda: longrope(ORIGINAL), edit=as_released),
    Case("factor", lambda: longrope(ORIGINAL, factor=3.0)),
    Case("attention-factor", lambda: longrope(ORIGINAL, attention_factor=1.5)),
    Case("tied", lambda: config(tie_word_embeddings=True)),
]
SHORT = Case("short-factors", lambda: longrope(64))


@golden_tests([CASE])
def test_phi3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([WINDOWED], [full_prefill, greedy, numba, window_is_exact])
def test_phi3_window_and_partial_rotary_match_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_phi3_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([SHORT], [full_prefill])
def test_phi3_served_length_chooses_the_factors(golden: Golden, equality: Equality) -> None:
    """The reference takes the short factors, because the prompt has 60 of the 64 positions."""
    found = last_logits(golden, golden.runner)  # all 128 positions are served
    assert (found - golden.logits).abs().max() > VISIBLE
    golden.runner = load(golden.folder, max_model_len=64)
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        (
            {"rope_parameters": LONGROPE | PART | {"long_factor": [1.0]}},
            "1 numbers as long_factor; 3",
        ),
        ({"rope_parameters": LONGROPE | PART | {"long_factor": 2.0}}, "long_factor = 2.0"),
        ({"rope_parameters": LONGROPE | PART | {"short_factor": [0.0]}}, "short_factor = 0.0"),
        ({"rope_parameters": LONGROPE | PART | {"long_factor": None}}, "lacks long_factor"),
        ({"rope_parameters": LONGROPE | PART | {"long_mscale": 1.0}}, "longrope with long_mscale"),
        ({"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.5}}, "at most 1"),
        ({"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.4}}, "even .* not 3"),
    ],
    ids=lambda value: str(next(iter(value.values())))[-40:] if isinstance(value, dict) else None,
)
def test_phi3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config(original_max_position_embeddings=ORIGINAL).to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        Phi3(given, max_positions=128, dtype=torch.float32)
