"""ModernBERT against transformers: local layers with their own rotary base, GeGLU, no biases."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.modernbert import ModernBert
from tests.support.encoders import (
    FEW,
    Encoder,
    EncoderCase,
    Equality,
    alone,
    encoder_tests,
)
from tests.support.golden import Tensors

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
    "local_attention": 8,
}


def config(**overrides: Any) -> Any:
    from transformers import ModernBertConfig

    ids = dict.fromkeys(("eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1)
    return ModernBertConfig(**(SMALL | ids | {"pad_token_id": 0} | overrides))


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the keys of ModernBERT-base."""
    del config["rope_parameters"], config["layer_types"]
    config["global_attn_every_n_layers"] = 3
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    config |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}


def reach(tokens: int) -> dict[str, int]:
    """A value of `local_attention` that reaches this number of tokens to each side."""
    return {"local_attention": 2 * tokens}


SWAPPED = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 160000.0},
}
CASE = EncoderCase(
    "plain",
    config,
    without=reach(3)
    | {
        "rope_parameters": SWAPPED,
        "layer_types": ["full_attention"] * 4,
        "hidden_activation": "silu",
    },
    zeroed=["layers.1.attn_norm", "embeddings.norm", "final_norm"],
)


@encoder_tests([CASE], quick=FEW)
def test_modernbert_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True}


@encoder_tests(
    [
        EncoderCase(
            "as-published",
            config,
            edit=as_published,
            without={"global_attn_every_n_layers": 2, "local_rope_theta": 50.0},
        ),
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("odd-window", lambda: config(local_attention=9), without=reach(5)),
        EncoderCase("odd-window-7", lambda: config(local_attention=7)),
        EncoderCase("window-of-one", lambda: config(local_attention=1)),
        EncoderCase(
            "biases",
            lambda: config(**BIASES),
            zeroed=["Wqkv.bias", "mlp.Wi.bias", "mlp.Wo.bias", "final_norm.bias"],
        ),
        EncoderCase("silu", lambda: config(hidden_activation="silu")),
    ],
    [alone],
)
def test_modernbert_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"sliding_window": 6}, "sliding_window = 6; .*: 4"),
        ({"local_rope_theta": None}, "lacks 'local_rope_theta'"),
        ({"local_attention": 0}, "local_attention = 0"),
        ({"num_attention_heads": 16}, "16 heads of 3 dimensions"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling dynamic"),
        ({"norm_eps": None}, "lacks 'norm_eps'"),
        ({"head_dim": 4}, "head_dim = 4"),
    ],
    ids=str,
)
def test_modernbert_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    known = SMALL | {"norm_eps": 1e-5}
    ModernBert.read_config(known)
    with pytest.raises(ConfigError, match=said):
        ModernBert.read_config(known | wrong)
