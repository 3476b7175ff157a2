"""Mistral against transformers, with and without a window."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.mistral import Mistral
from tests.support.golden import (
    EQUALITIES,
    WINDOW,
    WINDOW_LENGTHS,
    Case,
    Equality,
    Golden,
    full_prefill,
    golden_tests,
    greedy,
    window_is_exact,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import MistralConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
    }
    return MistralConfig(**(small | overrides))


WINDOWED = Case("window", config, without={"sliding_window": 128}, lengths=WINDOW_LENGTHS)


@golden_tests([WINDOWED], [*EQUALITIES, window_is_exact])
def test_mistral_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([Case("no-window", lambda: config(sliding_window=None))], [full_prefill, greedy])
def test_mistral_without_window_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"sliding_window": "long"}, "sliding_window = 'long'"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistral_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Mistral.read_config(config().to_dict() | wrong)


def test_mistral_missing_sliding_window_raises_config_error() -> None:
    pytest.importorskip("transformers")
    silent = config().to_dict()
    del silent["sliding_window"]
    with pytest.raises(ConfigError, match="lacks 'sliding_window'; add it, with null for none"):
        Mistral.read_config(silent)
