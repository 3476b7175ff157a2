"""Settings that are refused by name, in words for a user who has no config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder, notes_of
from engine.checkpoint.gguf.config import config_of
from engine.checkpoint.gguf.settings import (
    CLASSES,
    COMPUTED,
    HARMLESS,
    notes_on,
    own_settings,
)
from engine.errors import ConfigError
from tests.support.tiny_gguf import ARCHITECTURES, settings_of, shapes_of, write_tiny

pytestmark = pytest.mark.usefixtures("own_cache")
ROPE = "rope.scaling."


def settings(architecture: str = "llama", **own: Any) -> dict[str, Any]:
    given = settings_of(architecture) | {key.replace("__", "."): v for key, v in own.items()}
    named = {f"{architecture}.{key}": value for key, value in given.items()}
    return {"general.architecture": architecture, **named}


YARN = {f"{ROPE}type": "yarn", f"{ROPE}factor": 4.0}
CHANGES_NUMBERS = {
    "attention.causal": False,
    "attention.scale": 0.5,
    "attention.clamp_kqv": 0.1,
    "attention.max_alibi_bias": 8.0,
    "attention.temperature_scale": 0.1,
    "attention.value_length": 8,
    "attention.key_length_swa": 8,
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "logit_scale": 0.5,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_weights_scale": 2.0,
    "nextn_predict_layers": 1,
    "a_key_of_tomorrow": 3,
}


REFUSED = [(a, key) for a in ARCHITECTURES for key in CHANGES_NUMBERS if key not in COMPUTED[a]]


@pytest.mark.parametrize(("architecture", "key"), REFUSED)
def test_setting_that_would_change_numbers_is_refused_by_name(architecture: str, key: str) -> None:
    given = settings(architecture) | {f"{architecture}.{key}": CHANGES_NUMBERS[key]}
    with pytest.raises(ConfigError, match=re.escape(f"sets {architecture}.{key} to")):
        own_settings(given)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_settings_without_effect_are_served(architecture: str) -> None:
    neutral = {
        "vocab_size": 174,
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.max_alibi_bias": 0.0,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "expert_count": 0,
        "logit_scale": 1.0,
        "pooling_type": 3,
        "rope.scaling.finetuned": True,
        "tensor_data_layout": "Meta AI original pth",
    }
    given = settings(architecture)
    for key, value in neutral.items():
        if key not in COMPUTED[architecture]:
            own_settings(given | {f"{architecture}.{key}": value})
    tensors = shapes_of(architecture, given[f"{architecture}.block_count"])
    assert config_of(given, 174, tensors)["architectures"] == [CLASSES[architecture]]


@pytest.mark.parametrize(
    ("architecture", "own", "words"),
    [
        ("llama", {"rope__dimension_count": 8}, "sets llama.rope.dimension_count to 8.*Served"),
        ("llama", {f"{ROPE}type": "longrope"}, "llama.rope.scaling.type = 'longrope', which"),
        ("llama", {f"{ROPE}attn_factor": 0.0}, "llama.rope.scaling.attn_factor = 0.0; it must be"),
        ("llama", {"block_count": "two"}, "llama.block_count = 'two'; it must be a whole number"),
        ("llama", {"attention__head_count": 3, "attention__head_count_kv": 2}, "3 heads .* no m"),
        ("llama", {"block_count": 2**30}, "llama.block_count = 1073741824; .* below 10000"),
        ("llama", {"attention__key_length": 2**20}, "llama.attention.key_length = 1048576; it"),
        ("llama", {"attention__key_length": 15}, "heads of 15 dimensions; the number must be even"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "in llama.attention.head_count_kv: .1"),
        ("llama", {"attention__head_count": [2]}, "llama.attention.head_count has 1 entries"),
        ("llama", {"feed_forward_length": [64, 96]}, "in llama.feed_forward_length: .64, 96"),
        ("gpt2", {"attention__head_count_kv": 1}, "2 heads of 16 dimensions and 1 key/value heads"),
        ("gemma2", {"rope__freq_base_swa": 5.0}, "gemma2.rope.freq_base_swa = 5.0, another base"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "gemma2.final_logit_softcapping = 0.0; it"),
        ("gemma2", {f"{ROPE}type": "none", f"{ROPE}factor": 2.0}, "applies to layers with a win"),
        ("olmo2", {"attention__sliding_window": 8, "rope__freq_base_swa": 5.0}, "another base"),
        ("olmo2", {"attention__sliding_window": -1}, "olmo2.attention.sliding_window = -1; it"),
        ("cohere2", {"attention__sliding_window": 0}, "cohere2.attention.sliding_window = 0; it"),
        ("cohere2", {"logit_scale": -1.0}, "cohere2.logit_scale = -1.0; it must be a number ab"),
        ("mistral3", {"attention__temperature_scale": -1.0}, "attention.temperature_scale = -1.0"),
        ("mistral3", YARN | {f"{ROPE}yarn_log_multiplier": "x"}, "yarn_log_multiplier = 'x'; it"),
        ("mistral3", YARN | {f"{ROPE}yarn_beta_slow": -2.0}, "yarn_beta_slow = -2.0; it must be"),
        ("qwen2moe", {"expert_count": 0}, "qwen2moe.expert_count = 0; it must be a whole number"),
        ("glm4", {"rope__dimension_count": 7}, "glm4.rope.dimension_count = 7; .* even .* most 16"),
        ("glm4", {"rope__dimension_count": 32}, "glm4.rope.dimension_count = 32; it must be an ev"),
        ("stablelm", {"rope__dimension_count": "x"}, "stablelm.rope.dimension_count = 'x'; it mus"),
        ("starcoder2", {"rope__dimension_count": 8}, "starcoder2.rope.dimension_count to 8.*Serv"),
        ("exaone4", {"block_count": 64, "attention__sliding_window": 0}, "sliding_window = 0; it"),
        ("exaone4", {"rope__freq_base_swa": 5.0}, "exaone4.rope.freq_base_swa = 5.0, another base"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern = .True"),
        ("gemma3", {"attn_logit_softcapping": 1.0}, "gemma3.attn_logit_softcapping"),
        ("lfm2", {"attention__sliding_window": 8}, "lfm2.attention.sliding_window to 8"),
        ("lfm2", {"attention__head_count_kv": [0, 0, 0]}, "no key/value heads in any layer"),
        ("lfm2", {"attention__head_count_kv": [2, 1, 0]}, "in lfm2.attention.head_count_kv: .2, 1"),
        ("lfm2", {"attention__head_count_kv": [0, 1]}, "head_count_kv has 2 entries, for 3 layers"),
        ("lfm2moe", {"expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1; served is 2"),
    ],
)  # fmt: skip
def test_value_that_is_not_served_is_refused(
    architecture: str, own: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        config_of(settings(architecture, **own), 174)
    assert "config.json" not in str(error.value)


@pytest.mark.parametrize("key", ["block_count", "context_length", "feed_forward_length"])
def test_missing_setting_is_named(key: str) -> None:
    given = settings()
    del given[f"llama.{key}"]
    with pytest.raises(ConfigError, match=f"lacks llama.{key}"):
        own_settings(given)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("cohere2", "attention.sliding_window"),
        ("cohere2", "logit_scale"),
        ("command-r", "attention.layer_norm_epsilon"),
        ("qwen2moe", "expert_count"),
        ("lfm2", "shortconv.l_cache"),
        ("lfm2moe", "expert_gating_func"),
    ],
)
def test_missing_setting_of_an_architecture_is_named(architecture: str, key: str) -> None:
    given = settings(architecture)
    del given[f"{architecture}.{key}"]
    with pytest.raises(ConfigError, match=f"lacks {architecture}.{key}"):
        own_settings(given)


def test_docs_name_every_setting() -> None:
    page = (Path(__file__).parents[4] / "docs" / "gguf.md").read_text()
    keys = {key for computed in COMPUTED.values() for key in computed} | HARMLESS
    assert sorted(key for key in keys if f"`{key}`" not in page) == ["tensor_data_layout"]


def test_file_that_holds_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds no model: its general.type is 'adapter'"):
        own_settings(settings() | {"general.type": "adapter"})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.attn_k.weight": None}, "lacks the tensor blk.1.attn_k.weight, which llama models"),
        ({"blk.0.attn_q.scale": (1,)}, "'blk.0.attn_q.scale', which Penstock does not compute"),
        (
            {"blk.0.attn_norm.bias": (32,)},
            "'blk.0.attn_norm.bias', which Penstock does not compute",
        ),
        (
            {"blk.0.ffn_up.weight": (48, 32)},
            "shape .48, 32.; by the settings of the file it should",
        ),
        ({"rope_freqs.weight": [1.0] * 7 + [0.0]}, "8 numbers above 0 in rope_freqs.weight"),
    ],
)
def test_tensor_that_does_not_fit_is_named(
    tensors: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", tensors=tensors)
    with pytest.raises(ConfigError, match=words):
        model_folder(str(file))


def test_ignored_settings_are_noted(tmp_path: Path) -> None:
    changes = {f"{ROPE}yarn_beta_fast": 16.0, f"{ROPE}yarn_beta_slow": 1.0}
    file = write_tiny(tmp_path / "tiny.gguf", changes=changes)
    assert notes_of(model_folder(str(file))) == [
        "llama.rope.scaling.yarn_beta_fast 16.0 is ignored, as in llama.cpp"
    ]
    assert notes_on(settings(attention__sliding_window=3)) == [
        "llama.attention.sliding_window 3 is ignored, as in llama.cpp"
    ]
    assert notes_on(settings("gemma3")) == []
    large = settings("exaone4", attention__sliding_window=3, block_count=64)
    assert notes_on(large) == []
    assert notes_on(large | {"exaone4.block_count": 30}) == [
        "exaone4.attention.sliding_window 3 is ignored, as in llama.cpp"
    ]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (["blk.0.ffn_norm.weight", "blk.0.ffn_norm.bias"], "blk.0.ffn_norm.weight, which it has"),
        (["blk.1.attn_norm.bias"], "lacks the tensor blk.1.attn_norm.bias, which stablelm models"),
    ],
)
def test_blocks_of_stablelm_that_differ_are_refused(
    tensors: list[str], words: str, tmp_path: Path
) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", "stablelm", tensors=dict.fromkeys(tensors))
    with pytest.raises(ConfigError, match=words):
        model_folder(str(file))


def test_defaults_of_sampling_become_generation_settings(tmp_path: Path) -> None:
    start = "general.sampling."
    sampling = {f"{start}temp": 0.5, f"{start}top_k": 7, f"{start}mirostat": 2}
    suppressed = {"tokenizer.ggml.suppress_tokens": [20, 9999]}
    file = write_tiny(tmp_path / "tiny.gguf", more=sampling | suppressed)
    folder = model_folder(str(file))
    assert read_json(folder / "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": [2],
        "temperature": 0.5,
        "top_k": 7,
        "suppress_tokens": [20],
    }
    assert notes_of(folder) == ["general.sampling.mirostat 2 is ignored"]
    write_tiny(file, more={f"{start}top_p": 1.5})
    with pytest.raises(ConfigError, match=r"general\.sampling\.top_p = 1.5; it must be a num"):
        model_folder(str(file))
