"""Arcee's models against transformers: a plain MLP with relu²."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.arcee import Arcee
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config(**overrides: Any) -> Any:
    from transformers import ArceeConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return ArceeConfig(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of transformers 4, and leave out what has defaults."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    for key in ("hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        del config[key]


CASE = Case("relu2", config, without={"hidden_act": "relu"}, zeroed=["mlp.up_proj"])
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=YARN), edit=as_released),
    Case(
        "biases, tied",
        lambda: config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        zeroed=["up_proj.bias", "down_proj.bias", "o_proj.bias"],
    ),
]


@golden_tests([CASE])
def test_arcee_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_arcee_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


def test_arcee_unknown_activation_raises_config_error() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="hidden_act = 'tanh'"):
        Arcee.read_config(config().to_dict() | {"hidden_act": "tanh"})
