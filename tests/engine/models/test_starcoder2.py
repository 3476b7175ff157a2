"""StarCoder2 against transformers: LayerNorm, biases, a plain MLP, and one window of all layers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.starcoder2 import Starcoder2
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
    from transformers import Starcoder2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
    }
    return Starcoder2Config(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the keys of starcoder2-3b, which leaves out what has defaults."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config |= {"norm_type": "layer_norm", "mlp_type": "default", "layer_norm_epsilon": 1e-5}
    for key in ("tie_word_embeddings", "use_bias", "hidden_act"):
        del config[key]


ROPE = {"rope_type": "default", "rope_theta": 500.0}
BIASES = [
    *("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "c_fc.bias", "c_proj.bias"),
    *("input_layernorm.bias", "post_attention_layernorm.bias", "model.norm.bias"),
]
CASE = Case(
    "untied",
    lambda: config(tie_word_embeddings=False),
    without={"sliding_window": None, "hidden_act": "relu", "norm_epsilon": 10.0},
    zeroed=BIASES,
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case("as-released", lambda: config(rope_parameters=ROPE), edit=as_released),
    Case("no-bias, no window", lambda: config(use_bias=False, sliding_window=None)),
    Case("erf", lambda: config(hidden_act="gelu", head_dim=16, tie_word_embeddings=False)),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_starcoder2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_starcoder2_config_spelling_matches_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        ({"mlp_type": "gated"}, "mlp_type = 'gated'"),
        ({"hidden_act": "tanh"}, "hidden_act = 'tanh'"),
        ({"norm_epsilon": None}, "lacks 'norm_epsilon'"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
    ids=str,
)
def test_starcoder2_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Starcoder2.read_config(config().to_dict() | wrong)
