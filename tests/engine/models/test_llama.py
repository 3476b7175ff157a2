"""Llama against transformers, in every variant found in published checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.llama import Llama
from tests.support.driver import tiny_llama
from tests.support.golden import (
    EQUALITIES,
    Case,
    Equality,
    Golden,
    Tensors,
    chunked_prefill,
    full_prefill,
    golden_tests,
    greedy,
    load,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def config(**overrides: Any) -> Any:
    from transformers import LlamaConfig

    small = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    return LlamaConfig(**(small | overrides))


def rope(kind: str, **parameters: Any) -> Any:
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | parameters
    return config(rope_parameters=scaling, head_dim=16)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BIASES = [
    f"{module}.bias"
    for module in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
]


def old_spelling(config: dict[str, Any], tensors: Tensors) -> None:
    """Write rope_scaling and rope_theta as transformers 4 did; add the buffers of older files."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(8)


def old_type(config: dict[str, Any], tensors: Tensors) -> None:
    """Use the oldest spelling: `type` instead of `rope_type`."""
    old_spelling(config, tensors)
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


def copied_head(config: dict[str, Any], tensors: Tensors) -> None:
    """Store a copy of the head, as some tied checkpoints do."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


CASES = [
    Case("gqa", config, zeroed=["input_layernorm", "post_attention_layernorm", "model.norm"]),
    Case("mha-tied", lambda: config(num_key_value_heads=6, tie_word_embeddings=True)),
    Case("mqa-head-dim", lambda: config(num_attention_heads=4, num_key_value_heads=1, head_dim=32)),
    Case("biases", lambda: config(attention_bias=True, mlp_bias=True), zeroed=BIASES),
]
ROPES = [
    Case("llama3", lambda: rope("llama3", **LLAMA3), without=DEFAULT_ROPE),
    Case("linear", lambda: rope("linear"), without=DEFAULT_ROPE),
    Case(
        "yarn",
        lambda: rope("yarn", original_max_position_embeddings=32, beta_fast=8.0),
        without=DEFAULT_ROPE,
    ),
]
# Other spellings of settings that are tested above: one equality shows that they are read.
SPELLINGS = [
    Case("dynamic", lambda: rope("dynamic")),  # no scaling within the original length
    Case("theta", lambda: rope("default", rope_theta=500.0), without=DEFAULT_ROPE),
    Case("old-spelling", lambda: rope("llama3", **LLAMA3), edit=old_spelling),
    Case("old-type", lambda: rope("linear", rope_theta=500.0), edit=old_type),
    Case("yarn-factor", lambda: rope("yarn", attention_factor=1.5, truncate=False)),
    Case("yarn-mscale", lambda: rope("yarn", mscale=0.7, mscale_all_dim=1.5)),
    Case("sharded", lambda: config(tie_word_embeddings=True), shard_size="40KB"),
    Case("copied-head", lambda: config(tie_word_embeddings=True), edit=copied_head),
]


@golden_tests(CASES, quick=EQUALITIES)
@pytest.mark.variants(6)
def test_llama_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.variants(5)
@golden_tests(ROPES, [full_prefill, chunked_prefill, greedy])
def test_llama_rope_scaling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_llama_config_spelling_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)
    if golden.case.name == "sharded":
        assert len(list(golden.folder.glob("model-*-of-*.safetensors"))) > 3


@golden_tests([Case("gqa", config)], [full_prefill])
def test_llama_unpacked_weights_match_transformers(golden: Golden, equality: Equality) -> None:
    golden.runner = load(golden.folder, prepack=False)
    equality(golden)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_key_value_heads": 4}, "6 attention heads .* 4 key/value heads"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "'ntk' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": "x"}}, "mscale = 'x'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "big"}}, "factor.*'big'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "a different rope_scaling"),
        ({"rope_parameters": {"full_attention": {"factor": 2.0}}}, "separate .* full_attention;"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"\['yarn'\] is not supported"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta = inf"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
            "yarn needs a value above 1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_llama_unsupported_config_raises_config_error(wrong: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    given = config().to_dict() | wrong
    with pytest.raises(ConfigError, match=said), torch.device("meta"):
        Llama(given, max_positions=128, dtype=torch.float32)


def test_llama_max_model_len_above_positions_raises_config_error(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", max_position_embeddings=64)
    assert load(folder, max_model_len=64).rows.tokens.shape[1] == 65
    with pytest.raises(ConfigError, match="65 is more than the 64 positions"):
        load(folder, max_model_len=65)
