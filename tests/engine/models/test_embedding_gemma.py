"""EmbeddingGemma against transformers: Gemma 3 that sees both sides, with half the window each."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.embedding_gemma import EmbeddingGemma
from tests.engine.models import test_gemma3
from tests.support.encoders import FEW, Encoder, EncoderCase, Equality, alone, encoder_tests
from tests.support.golden import Tensors, unnormalised

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = test_gemma3.SMALL | {"sliding_window": 8, "use_bidirectional_attention": True}


def config(**overrides: Any) -> Any:
    return test_gemma3.config(**(SMALL | overrides))


def old_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the form of embeddinggemma-300m, and names to those of the decoder."""
    test_gemma3.old_spelling(config, tensors)
    config["sliding_window_pattern"] = 3
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


SAME_ROPE = dict.fromkeys(("full_attention", "sliding_attention"), test_gemma3.LOCAL)
CASE = EncoderCase(
    "plain",
    config,
    without={
        "sliding_window": 6,
        "rope_parameters": SAME_ROPE,
        "layer_types": ["full_attention"] * 4,
        "query_pre_attn_scalar": 16,
    },
    zeroed=["post_attention_layernorm", "k_proj"],
    replaced={"engine.layers.attention.RotaryAttention.forward": unnormalised},
)


@encoder_tests([CASE], quick=FEW)
def test_embedding_gemma_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase("old-spelling", config, edit=old_spelling),
        # Windows of 8 and 9 are the same.
        EncoderCase("odd-window", lambda: config(sliding_window=9), without={"sliding_window": 10}),
    ],
    [alone],
)
def test_embedding_gemma_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention = False"),
        ({"use_bidirectional_attention": None}, "lacks 'use_bidirectional_attention'"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"sliding_window": None}, "without a sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"full_attention": DYNAMIC}}, "rope_scaling dynamic"),
    ],
    ids=str,
)
def test_embedding_gemma_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    known = SMALL | {"rms_norm_eps": 1e-6}
    EmbeddingGemma.read_config(known)
    with pytest.raises(ConfigError, match=said):
        EmbeddingGemma.read_config(known | wrong)
