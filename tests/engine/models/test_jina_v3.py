"""Jina Embeddings v3 against transformers: BERT with rotary positions under other names."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.registry import model_class
from engine.ops.rotary import apply_rotary_pairs
from tests.support.encoders import FEW, Encoder, EncoderCase, Equality, alone, encoder_tests

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import JinaEmbeddingsV3Config

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 96,
    }
    return JinaEmbeddingsV3Config(**(small | overrides))


CASE = EncoderCase(
    "plain",
    config,
    zeroed=["token_type_embeddings", "Wqkv.bias", "fc1.bias"],
    replaced={"engine.models.nomic_bert.apply_rotary": apply_rotary_pairs},
)


@encoder_tests([CASE], quick=FEW)
def test_jina_v3_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests([EncoderCase("masked-lm", config, "AutoModelForMaskedLM")], [alone])
def test_jina_v3_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


def test_jina_v3_with_code_of_its_own_is_refused() -> None:
    """The first release calls itself XLM-RoBERTa, but has other layers and adapters inside."""
    code = {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"}
    with pytest.raises(ConfigError, match="auto_map"):
        model_class({"architectures": ["XLMRobertaModel"], "auto_map": code})
