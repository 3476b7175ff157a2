"""Gemma 2 against transformers: softcaps, windows, the attention scale, and all norms."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.gemma2 import Gemma2
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
UNBOUNDED = 1e6
NORMS = [
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
]


def config(**overrides: Any) -> Any:
    from transformers import Gemma2Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
    }
    return Gemma2Config(**(small | overrides))


def as_released(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove layer_types: then every other layer has a window, starting with the first."""
    del config["layer_types"], config["tie_word_embeddings"]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config |= {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}


CASE = Case(
    "all",
    lambda: config(tie_word_embeddings=False),
    without={
        "attn_logit_softcapping": UNBOUNDED,
        "final_logit_softcapping": UNBOUNDED,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention"] * 4,
    },
    zeroed=[*NORMS, "lm_head"],
    replaced={"engine.layers.norm.OffsetRMSNorm.offset": False},
    lengths=WINDOW_LENGTHS,
)
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
SPELLINGS = [
    Case("as-released", config, edit=as_released),
    Case("no-caps", lambda: config(**NO_CAPS)),
]


@golden_tests([CASE], [*EQUALITIES, window_is_exact])
def test_gemma2_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_gemma2_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize(
    "key",
    [
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ],
)
def test_gemma2_missing_key_raises_config_error(key: str) -> None:
    pytest.importorskip("transformers")
    silent = config().to_dict()
    del silent[key]
    with pytest.raises(ConfigError, match=f"lacks '{key}'"):
        Gemma2.read_config(silent)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attn_logit_softcapping": 0.0},
        {"final_logit_softcapping": "high"},
        {"query_pre_attn_scalar": -1},
        {"sliding_window": None},
        {"use_bidirectional_attention": True},
    ],
    ids=str,
)
def test_gemma2_unsupported_config_raises_config_error(wrong: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Gemma2.read_config(config().to_dict() | wrong)
