"""MPNet against transformers: a relative bias, and positions that count from padding."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.mpnet import MPNet
from tests.support.encoders import (
    FEW,
    LENGTHS,
    Encoder,
    EncoderCase,
    Equality,
    alone,
    encoder_tests,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": LENGTHS[-1] + 2,  # the longest text reaches the last row
}


def config(**overrides: Any) -> Any:
    from transformers import MPNetConfig

    return MPNetConfig(**(SMALL | overrides))


CASE = EncoderCase("plain", config, zeroed=["relative_attention_bias", "position_embeddings"])


@encoder_tests([CASE], quick=FEW)
def test_mpnet_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        # Positions count from 1 in any case.
        EncoderCase("few-tokens", lambda: config(vocab_size=5, pad_token_id=3)),
    ],
    [alone],
)
def test_mpnet_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets = 64"),
        ({"relative_attention_num_buckets": 8}, "relative_attention_num_buckets = 8"),
        ({"max_position_embeddings": 2}, "max_position_embeddings = 2"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
    ],
    ids=str,
)
def test_mpnet_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MPNet.read_config(SMALL | {"layer_norm_eps": 1e-12} | wrong)
