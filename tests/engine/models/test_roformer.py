"""RoFormer against transformers: rotation of neighbouring dimensions, of values, and projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.roformer import RoFormer
from engine.ops.rotary import apply_rotary
from tests.support.encoders import Encoder, EncoderCase, Equality, alone, encoder_tests
from tests.support.golden import Tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**overrides: Any) -> Any:
    from transformers import RoFormerConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 96,
    }
    return RoFormerConfig(**(small | overrides))


def without_tables(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the sinusoids, a buffer that not every file contains."""
    for name in [name for name in tensors if "embed_positions" in name]:
        del tensors[name]


ROTATE = "engine.models.roformer.apply_rotary_pairs"
CASES = [
    EncoderCase(
        "plain",
        config,
        zeroed=["token_type_embeddings", "key.weight", "embeddings.LayerNorm.bias"],
        replaced={ROTATE: lambda x, cos, sin, kernels: x},
    ),
    EncoderCase("values-too", lambda: config(rotary_value=True), replaced={ROTATE: apply_rotary}),
]


@encoder_tests(CASES)
def test_roformer_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase(
            "values-alone", lambda: config(rotary_value=True), without={"rotary_value": False}
        ),
        EncoderCase("projected", lambda: config(embedding_size=20), zeroed=["embeddings_project"]),
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM", edit=without_tables),
    ],
    [alone],
)
def test_roformer_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"rotary_value": None}, "rotary_value = None"),
        ({"embedding_size": 0}, "embedding_size = 0"),
        ({"hidden_size": 30}, "6 heads of 5"),
        ({"max_position_embeddings": None}, "lacks 'max_position_embeddings'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_roformer_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        RoFormer(given, max_positions=96, dtype=torch.float32)
