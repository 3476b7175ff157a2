"""Granite against transformers: the four multipliers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.granite import MULTIPLIERS, Granite
from tests.support.golden import Case, Equality, Golden, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GraniteConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "embedding_multiplier": 3.3,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.7,
    }
    return GraniteConfig(**(small | overrides))


CASE = Case(
    "multipliers",
    config,
    without=dict.fromkeys(MULTIPLIERS, 1.0),
    zeroed=["input_layernorm", "post_attention_layernorm"],
)
SILENT = dict.fromkeys(MULTIPLIERS, 1.0)


def without_multipliers(config: dict[str, Any], tensors: Any) -> None:
    for key in MULTIPLIERS:
        del config[key]


SPELLINGS = [
    Case("silent", lambda: config(**SILENT), edit=without_multipliers),
    Case("tied-biases", lambda: config(tie_word_embeddings=True, attention_bias=True)),
]


@golden_tests([CASE])
def test_granite_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_granite_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("key", MULTIPLIERS)
def test_granite_invalid_multiplier_raises_config_error(key: str) -> None:
    pytest.importorskip("transformers")
    for wrong in (0, "big", None):
        with pytest.raises(ConfigError, match=key):
            Granite.read_config(config().to_dict() | {key: wrong})
