"""Command R7B against transformers: windows with rotary embedding, global layers without."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.cohere2 import Cohere2
from engine.ops.rotary import apply_rotary
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
PUBLISHED = {  # in the config.json of Command R7B
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
}


def config(**overrides: Any) -> Any:
    from transformers import Cohere2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    }
    return Cohere2Config(**(small | overrides))


def published(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of the published checkpoints."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    for key in ("layer_types", "tie_word_embeddings", "head_dim"):
        del config[key]
    config |= PUBLISHED


CASE = Case(
    "cohere2",
    lambda: config(logit_scale=2.0),
    without={"logit_scale": 1.0, "layer_types": ["sliding_attention"] * 4},
    replaced={"engine.ops.rotary.apply_rotary_pairs": apply_rotary},
    lengths=WINDOW_LENGTHS,
)
SPELLINGS = [
    Case(
        "published",
        lambda: config(tie_word_embeddings=True, rope_parameters={"rope_theta": 500.0}),
        edit=published,
        without={"rope_theta": None},
    ),
    Case(
        "pattern",
        lambda: config(sliding_window_pattern=2, attention_bias=True),
    ),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_cohere2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_cohere2_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"sliding_window": None}, "without a sliding_window"),
        ({"layer_types": None, "layer_switch": 3}, "layer_switch = 3"),
        ({"layer_types": None, "order_of_interleaved_layers": "x"}, "order_of_interleaved_layers"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ],
    ids=str,
)
def test_cohere2_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=said):
        Cohere2.read_config(config().to_dict() | wrong)
