"""Command R against transformers: a parallel block, and rotation of neighbouring dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.cohere import THETA, Cohere
from engine.ops.rotary import apply_rotary
from tests.support.golden import Case, Equality, Golden, Tensors, full_prefill, golden_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import CohereConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return CohereConfig(**(small | overrides))


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of the published checkpoints, without what is the default."""
    assert config.pop("rope_parameters") == {"rope_type": "default", "rope_theta": THETA}
    for key in ("tie_word_embeddings", "layer_norm_eps", "logit_scale", "num_key_value_heads"):
        del config[key]


CASE = Case(
    "cohere",
    lambda: config(logit_scale=2.0),
    without={"logit_scale": 1.0},
    zeroed=["input_layernorm", "model.norm"],
    replaced={"engine.ops.rotary.apply_rotary_pairs": apply_rotary},
)
SPELLINGS = [
    Case(
        "published",
        lambda: config(tie_word_embeddings=True, num_key_value_heads=None),
        edit=published,
    ),
    Case("biases", lambda: config(attention_bias=True)),
]


@golden_tests([CASE])
def test_cohere_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_cohere_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "wrong",
    [
        {"use_qk_norm": True},
        {"use_parallel_block": False},
        {"rotary_pct": 0.5},
        {"mlp_bias": True},
        {"logit_scale": 0},
    ],
    ids=str,
)
def test_cohere_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cohere.read_config(config().to_dict() | wrong)
