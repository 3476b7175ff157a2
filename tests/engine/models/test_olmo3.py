"""OLMo 3 against transformers: windows, and scaling on the layers without one."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.olmo3 import THETA, Olmo3
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
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.14,
    "beta_fast": 32,
    "beta_slow": 1,
}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GLOBAL = YARN | {"rope_theta": 1000.0}


def config(**overrides: Any) -> Any:
    from transformers import Olmo3Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": LOCAL},
    }
    return Olmo3Config(**(small | overrides))


def old_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of the published checkpoints."""
    del config["layer_types"]
    parameters = config.pop("rope_parameters")
    assert parameters["sliding_attention"]["rope_theta"] == THETA
    config["rope_scaling"] = parameters["full_attention"]
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")


CASE = Case(
    "olmo3",
    config,
    without={
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL},
    },
    zeroed=["q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"],
    lengths=WINDOW_LENGTHS,
)
# Outside of rope_parameters, the base is that of global layers only.
PUBLISHED = Case(
    "published",
    lambda: config(rope_parameters=None, rope_theta=100.0, rope_scaling=dict(YARN)),
    edit=old_spelling,
    without={"rope_theta": None, "rope_scaling": None},
)


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_olmo3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests([PUBLISHED], [full_prefill])
def test_olmo3_published_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"sliding_window": None}, "without a sliding_window"),
        ({"rope_parameters": LOCAL}, "full_attention and sliding_attention each"),
        ({"rope_parameters": {"full_attention": [1]}}, "full_attention must be an object"),
        ({"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, "truncate = False"),
        ({"rope_parameters": None, "rope_scaling": YARN | {"truncate": False}}, "truncate = False"),
        ({"rope_scaling": YARN}, "rope_parameters and rope_scaling"),
    ],
    ids=str,
)
def test_olmo3_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Olmo3.read_config(config().to_dict() | wrong)
