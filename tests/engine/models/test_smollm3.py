"""SmolLM3 against transformers: layers without rotary embedding, with and without windows."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.smollm3 import SmolLM3
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
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import SmolLM3Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return SmolLM3Config(**(small | overrides))


def by_interval(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove what has defaults: every fourth layer has no rotary, the head is tied."""
    del config["no_rope_layers"], config["layer_types"], config["tie_word_embeddings"]
    del config["rope_parameters"]


SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
CASE = Case(
    "slides",
    lambda: config(**SLIDING, no_rope_layer_interval=2, tie_word_embeddings=False),
    without={"no_rope_layers": [1, 1, 1, 1], "layer_types": ["full_attention"] * 4},
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case("by-interval", config, edit=by_interval, without={"no_rope_layers": [1, 1, 1, 1]}),
    Case("by-list", lambda: config(no_rope_layers=[0, 1, 0, 1], attention_bias=True)),
    Case("interval", lambda: config(no_rope_layer_interval=3)),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_smollm3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_smollm3_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ({"layer_types": ["sliding_attention"] * 4}, "without a sliding_window"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window = -1"),
    ],
    ids=str,
)
def test_smollm3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        SmolLM3.read_config(config().to_dict() | wrong)
