"""Ministral 3 against transformers, and the language models of multimodal checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.models.ministral3 import ROPE, TEXT_DEFAULTS, Ministral3, Mistral3
from tests.support.golden import (
    WINDOW,
    Case,
    Equality,
    Golden,
    Tensors,
    full_prefill,
    golden_tests,
    refusal,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
REST = {"rms_norm_eps": 1e-5, "sliding_window": None}
YARN = ROPE | {
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}


def config(**overrides: Any) -> Any:
    from transformers import Ministral3Config

    return Ministral3Config(**(SMALL | {"rope_parameters": dict(YARN)} | overrides))


def multimodal(kind: str, tied: bool = False, **text: Any) -> Any:
    from transformers import Mistral3Config

    vision = {
        "model_type": "pixtral",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "image_size": 8,
        "patch_size": 4,
    }
    text = SMALL | {"model_type": kind} | text
    return Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def silent(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the key that published checkpoints lack."""
    del config["tie_word_embeddings"]


def new_names(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename tensors to the prefixes that transformers has in memory."""
    for name in list(tensors):
        renamed = name.replace("language_model.model.", "model.language_model.")
        renamed = renamed.replace("language_model.lm_head.", "lm_head.")
        tensors[renamed if renamed != name else f"model.{name}"] = tensors.pop(name)


CASE = Case(
    "ministral3",
    config,
    without={"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
)
SPELLINGS = [
    Case("windowed", lambda: config(sliding_window=WINDOW, tie_word_embeddings=True)),
    Case("defaults", lambda: config(rope_parameters=None)),
]
MULTIMODAL = [
    Case("ministral3", lambda: multimodal("ministral3", rope_parameters=dict(YARN))),
    Case("mistral", lambda: multimodal("mistral", sliding_window=None)),
    Case("tied", lambda: multimodal("mistral", tied=True)),
    Case("silent-untied", lambda: multimodal("mistral"), edit=silent),
    Case("silent-tied", lambda: multimodal("ministral3", tied=True), edit=silent),
    Case("new-names", lambda: multimodal("ministral3"), edit=new_names),
]


@golden_tests([CASE])
def test_ministral3_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(SPELLINGS, [full_prefill])
def test_ministral3_config_spelling_matches_transformers(
    golden: Golden, equality: Equality
) -> None:
    equality(golden)


def accounts_for_text_tensors(golden: Golden) -> None:
    """Every tensor outside the vision half is required, and further tensors are refused."""
    missing = "language_model.model.layers.2.mlp.up_proj.weight"
    assert missing in refusal(golden, lambda config, tensors: tensors.pop(missing))
    for surplus in ("audio_tower.weight", "language_model.vision_tower.weight"):
        extra = {surplus: torch.ones(1)}
        assert surplus in refusal(golden, lambda config, tensors, e=extra: tensors.update(e))


@golden_tests(MULTIMODAL, [full_prefill])
def test_mistral3_language_model_matches_transformers(golden: Golden, equality: Equality) -> None:
    equality(golden)


@golden_tests(MULTIMODAL[:1], [accounts_for_text_tensors])
def test_mistral3_accounts_for_text_tensors(golden: Golden, equality: Equality) -> None:
    equality(golden)


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_mistral3_sparse_text_config_gets_transformers_defaults(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    defaults = getattr(transformers, kind.capitalize() + "Config")()
    expected = TEXT_DEFAULTS[kind]
    assert {key: getattr(defaults, key) for key in expected} == expected
    found = Mistral3.read_config({"text_config": {"model_type": kind, "hidden_size": 5120}})
    whole = transformers.Mistral3Config(
        text_config={"model_type": kind, "hidden_size": 5120}, tie_word_embeddings=False
    )
    assert found == Mistral3.read_config(whole.to_dict())


def test_ministral3_missing_original_length_is_the_longest() -> None:
    """As in transformers, which then never scales queries."""
    pytest.importorskip("transformers")
    given = dict(YARN)
    del given["original_max_position_embeddings"]
    found = Ministral3.read_config(SMALL | {"rope_parameters": given, **REST}).query_scaling
    assert found is not None
    assert found.period == SMALL["max_position_embeddings"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": None}}, "llama_4_scaling_beta = None"),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta = -1"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings = 0",
        ),
    ],
    ids=str,
)
def test_ministral3_unsupported_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Ministral3.read_config(SMALL | REST | {"rope_parameters": YARN} | wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "text_config"),
        ({"text_config": [3]}, "must be an object"),
        ({"text_config": {"model_type": "llama"}}, "model_type = 'llama'"),
    ],
    ids=str,
)
def test_mistral3_unsupported_text_config_raises_config_error(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Mistral3.read_config(wrong)
