"""Qwen2 against transformers: biases on q, k and v, and optional layers with a window."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen2 import Qwen2
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
    greedy,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
FULL = ["full_attention"] * 3


def config(**overrides: Any) -> Any:
    from transformers import Qwen2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return Qwen2Config(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove layer_types, as in configs on the hub; then `max_window_layers` decides."""
    del config["layer_types"]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def switched_off(config: dict[str, Any], tensors: Tensors) -> None:
    as_released(config, tensors)
    config |= {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 0}


CASE = Case(
    "tied",
    lambda: config(tie_word_embeddings=True),
    zeroed=["q_proj.bias", "k_proj.bias", "v_proj.bias"],
)
SLIDES = Case(
    "slides", lambda: config(**SLIDING), without={"layer_types": FULL}, lengths=WINDOW_LENGTHS
)
SPELLINGS = [
    Case("slides-by-index", lambda: config(**SLIDING), edit=as_released),
    Case("switched-off", config, edit=switched_off),
    Case("layer-types", lambda: config(**SLIDING, layer_types=[*FULL[1:], "sliding_attention"])),
]


@golden_tests([CASE])
def test_qwen2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([SLIDES], [*EQUALITIES, window_is_exact])
def test_qwen2_sliding_window_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill, greedy])
def test_qwen2_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": FULL[1:]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": [*FULL[1:], "chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": [*FULL[1:], "sliding_attention"]}, "without a sliding_window"),
        ({"layer_types": [*FULL[1:], ["sliding_attention"]]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window = -1"),
        ({"max_window_layers": "few"}, "max_window_layers = 'few'"),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else None,
)
def test_qwen2_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Qwen2.read_config(config().to_dict() | wrong)
