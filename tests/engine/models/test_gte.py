"""GTE against transformers: rotary positions, GeGLU, fused tensors, no table of types if empty."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.gte import Gte
from engine.ops.rotary import apply_rotary_pairs
from tests.support.encoders import FEW, Encoder, EncoderCase, Equality, alone, encoder_tests
from tests.support.golden import Tensors

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
}


def config(**overrides: Any) -> Any:
    from transformers import GteConfig

    return GteConfig(**(SMALL | overrides))


def without_theta(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the default base, and to keys of the code that trained GTE."""
    del config["rope_parameters"]
    config |= {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    config["logn_attention_scale"] = False


CASE = EncoderCase(
    "plain",
    config,
    zeroed=["token_type_embeddings", "qkv_proj.bias", "mlp.down_proj.bias"],
    replaced={"engine.models.nomic_bert.apply_rotary": apply_rotary_pairs},
)


@encoder_tests([CASE], quick=FEW)
def test_gte_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@encoder_tests(
    [
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("no-types", lambda: config(type_vocab_size=0)),
        EncoderCase("default-theta", config, edit=without_theta, without={"rope_theta": 100.0}),
        EncoderCase(
            "silu", lambda: config(hidden_act="silu"), without={"hidden_act": "gelu_pytorch_tanh"}
        ),
    ],
    [alone],
)
def test_gte_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type_vocab_size": -1}, "type_vocab_size = -1"),
        ({"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "rope_scaling dynamic"),
        ({"head_dim": 24}, "head_dim = 24"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type = 'rms_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale = True"),
    ],
    ids=str,
)
def test_gte_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    known = SMALL | {"layer_norm_eps": 1e-12, "type_vocab_size": 1}
    Gte.read_config(known)
    with pytest.raises(ConfigError, match=said):
        Gte.read_config(known | wrong)
