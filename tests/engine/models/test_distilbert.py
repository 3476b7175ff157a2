"""DistilBERT against transformers: BERT's blocks under other names, without token types."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.distilbert import DistilBert
from tests.support.encoders import (
    FEW,
    Encoder,
    EncoderCase,
    Equality,
    alone,
    encoder_tests,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import DistilBertConfig

    small = {
        "vocab_size": 211,
        "dim": 48,
        "n_layers": 3,
        "n_heads": 6,
        "hidden_dim": 80,
        "max_position_embeddings": 96,
    }
    return DistilBertConfig(**(small | overrides))


CASE = EncoderCase("plain", config, zeroed=["position_embeddings", "k_lin.weight", "ffn.lin1.bias"])


@encoder_tests([CASE], quick=FEW)
def test_distilbert_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("relu", lambda: config(activation="relu"), without={"activation": "gelu"}),
        EncoderCase("sinusoids", lambda: config(sinusoidal_pos_embds=True)),
    ],
    [alone],
)
def test_distilbert_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"activation": "mish"}, "activation = 'mish'"),
        ({"dim": None}, "lacks 'dim'"),
        ({"n_heads": 5}, "dim 48, which is not divisible by 5"),
        ({"n_layers": 0}, "n_layers = 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_distilbert_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    small = {"vocab_size": 211, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 80}
    with pytest.raises(ConfigError, match=said):
        DistilBert.read_config(small | {"max_position_embeddings": 96} | wrong)
