"""Granite with experts against transformers: all experts of a layer are in one tensor."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.granite import MULTIPLIERS
from engine.models.granite_moe import GraniteMoe
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import GraniteMoeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 128,
        "embedding_multiplier": 3.3,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.7,
    }
    return GraniteMoeConfig(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and leave out what has defaults."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    for key in ("attention_bias", "tie_word_embeddings"):
        config.pop(key, None)


ROPE = {"rope_type": "default", "rope_theta": 500.0}
CASE = Case(
    "experts",
    config,
    without=dict.fromkeys(MULTIPLIERS, 1.0) | {"num_experts_per_tok": 2},
    zeroed=["input_linear", "output_linear", "router.layer"],
)
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=ROPE), edit=as_released),
    Case("tied-biases", lambda: config(tie_word_embeddings=True, attention_bias=True)),
]


@golden_tests([CASE])
def test_granite_moe_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_granite_moe_config_spelling_matches_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong", [{"num_experts_per_tok": 6}, {"num_local_experts": 0}, {"logits_scaling": 0}], ids=str
)
def test_granite_moe_invalid_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GraniteMoe.read_config(config().to_dict() | wrong)
