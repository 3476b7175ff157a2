"""Nomic Embed against transformers: rotary positions, SwiGLU, and the keys of published files."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.nomic_bert import KEYS, NomicBert
from engine.models.registry import model_class
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
# Values in the config.json of nomic-embed-text-v1.5 that say how it computes.
PUBLISHED = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
CODE = {
    "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
    "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
}


def config(**overrides: Any) -> Any:
    from transformers import NomicBertConfig

    return NomicBertConfig(**(SMALL | overrides))


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Edit config.json to the keys of nomic-embed-text-v1.5, which name code to run."""
    for key, old in KEYS.items():
        if key in config:
            config[old] = config.pop(key)
    for key in ("hidden_act", "rope_parameters", "head_dim"):
        del config[key]
    config.update(PUBLISHED | {"auto_map": CODE})


ROTATE = "engine.models.nomic_bert.apply_rotary"
CASE = EncoderCase(
    "plain",
    config,
    zeroed=["token_type_embeddings", "fc12", "emb_ln.bias"],
    replaced={ROTATE: apply_rotary_pairs},
)


@encoder_tests([CASE], quick=FEW)
def test_nomic_bert_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}


@encoder_tests(
    [
        EncoderCase("as-published", config, edit=as_published, without={"rotary_emb_base": 100000}),
        EncoderCase("masked-lm", config, "AutoModelForMaskedLM"),
        EncoderCase("gelu", lambda: config(hidden_act="gelu"), without={"hidden_act": "silu"}),
        EncoderCase(
            "linear-rope",
            lambda: config(rope_parameters=LINEAR),
            without={"rope_parameters": LINEAR | {"factor": 1.0}},
        ),
    ],
    [alone],
)
def test_nomic_bert_variant_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)


ORIGINAL = {KEYS.get(key, key): value for key, value in SMALL.items()} | PUBLISHED
ORIGINAL |= {"layer_norm_epsilon": 1e-12, "type_vocab_size": 2}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"activation_function": "gelu"}, "activation_function = 'gelu'"),
        ({"activation_function": None}, "activation_function"),
        ({"rotary_emb_fraction": 0.0}, "rotary_emb_fraction = 0.0"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction = 0.5"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved = True"),
        ({"rotary_scaling_factor": 2}, "rotary_scaling_factor = 2"),
        ({"prenorm": True}, "prenorm = True"),
        ({"causal": True}, "causal = True"),
        ({"use_rms_norm": True}, "use_rms_norm = True"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias = True"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"hidden_size": 96}, "hidden_size = 96; .*: 48"),
        ({"n_inner": None}, "lacks 'intermediate_size'"),
        ({"head_dim": 16}, "head_dim = 16"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling dynamic"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else None,
)
def test_nomic_bert_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    NomicBert.read_config(ORIGINAL)
    with pytest.raises(ConfigError, match=said):
        NomicBert.read_config(ORIGINAL | wrong)


@pytest.mark.parametrize(
    "key", ["activation_function", "rotary_emb_fraction", "qkv_proj_bias", "mlp_fc1_bias"]
)
def test_nomic_bert_original_config_without_a_variant_raises_config_error(key: str) -> None:
    """The defaults of the original code are another model."""
    with pytest.raises(ConfigError, match=f"lacks '{key}'"):
        NomicBert.read_config({k: v for k, v in ORIGINAL.items() if k != key})


def test_nomic_bert_other_code_is_refused() -> None:
    name = {"architectures": ["NomicBertModel"]}
    assert model_class(name | {"auto_map": CODE})[0] == "NomicBertModel"
    other = CODE | {"AutoModel": "modeling_evil.NomicBertModel"}
    with pytest.raises(ConfigError, match="auto_map"):
        model_class(name | {"auto_map": other})
