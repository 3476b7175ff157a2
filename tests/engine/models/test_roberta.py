"""RoBERTa, XLM-RoBERTa and CamemBERT against transformers: positions that count from padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.bert import Bert
from engine.models.roberta import Roberta
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
    "type_vocab_size": 1,
}


def config(**overrides: Any) -> Any:
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(**(SMALL | overrides))


def roberta(**overrides: Any) -> Any:
    from transformers import RobertaConfig

    return RobertaConfig(**(SMALL | {"type_vocab_size": 2} | overrides))


def camembert() -> Any:
    from transformers import CamembertConfig

    return CamembertConfig(**SMALL)


def of_few_tokens() -> Any:
    """A vocabulary so small that texts contain the padding token."""
    return config(vocab_size=5, pad_token_id=3, max_position_embeddings=LENGTHS[-1] + 4)


CASE = EncoderCase(
    "plain",
    config,
    zeroed=["position_embeddings", "token_type_embeddings"],
    replaced={"engine.models.roberta.Roberta.rows_of_positions": Bert.rows_of_positions},
)


@encoder_tests([CASE], quick=FEW)
def test_roberta_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


def uncounted(self: Roberta, batch: Any) -> torch.Tensor:
    """Stand-in for Roberta.rows_of_positions that counts padding tokens, too."""
    return batch.positions + self.config.pad + 1


@encoder_tests(
    [
        EncoderCase(
            "padding-inside",
            of_few_tokens,
            replaced={"engine.models.roberta.Roberta.rows_of_positions": uncounted},
        ),
        EncoderCase("roberta", lambda: roberta(layer_norm_eps=1e-5)),
        EncoderCase("roberta-masked-lm", roberta, "AutoModelForMaskedLM"),
        EncoderCase("xlm-roberta-masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("camembert", camembert),
        EncoderCase("camembert-masked-lm", camembert, "AutoModelForMaskedLM"),
        EncoderCase("other-padding", lambda: roberta(pad_token_id=0)),
    ],
    [alone],
)
def test_roberta_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


def test_roberta_positions_after_padding_are_the_longest_text() -> None:
    assert Roberta.read_config(SMALL | {"layer_norm_eps": 1e-5}).max_positions == LENGTHS[-1]
    bge_m3 = SMALL | {"layer_norm_eps": 1e-5, "max_position_embeddings": 8194}
    assert Roberta.read_config(bge_m3 | {"pad_token_id": 1}).max_positions == 8192


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pad_token_id": None}, "pad_token_id = None"),
        ({"pad_token_id": -1}, "pad_token_id = -1"),
        ({"pad_token_id": 211}, "pad_token_id = 211"),
        ({"max_position_embeddings": 2}, "max_position_embeddings = 2; .* at least 3"),
        ({"type_vocab_size": 0}, "type_vocab_size = 0"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else None,
)
def test_roberta_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Roberta.read_config(SMALL | {"layer_norm_eps": 1e-5} | wrong)
