"""Keys of config.json that only single architectures have, from a GGUF file's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine.checkpoint.gguf.delta import head_sizes, recurrent_layers
from engine.checkpoint.gguf.gemma4 import GEMMA4, gemma4_config
from engine.checkpoint.gguf.gpt_oss import GPT_OSS, gpt_oss_config
from engine.checkpoint.gguf.granite import GRANITE, SCALES, granite_config, granite_scales
from engine.checkpoint.gguf.hybrids import lfm2_config
from engine.checkpoint.gguf.llamas import CONFIGS, rotated_share
from engine.checkpoint.gguf.settings import (
    EXAONE_LAYERS,
    LAYER_NORM,
    MIXTURES,
    TEMPERATURE,
    Settings,
)
from engine.checkpoint.gguf.shapes import expert_sizes
from engine.errors import ConfigError

GEMMAS = ("gemma", "gemma2", "gemma3", "gemma-embedding")
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models: scale by hidden / heads
# One layer of these has no window.
PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "olmo2": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma-embedding": 6,
    GPT_OSS: 2,
}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # Gemma 2's defaults
DEFAULT_WINDOW = 4096  # Gemma 2's and EXAONE 4's
WINDOW = "attention.sliding_window"


def family_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the keys that only this architecture has. `own` are its settings.

    Raises ConfigError for a value that is not served.
    """
    family = FAMILIES.get(name)
    return {} if family is None else family(name, own)


def _gemma_config(name: str, own: Settings) -> dict[str, Any]:
    width, window = own["attention.key_length"], own.get(WINDOW)
    if own["block_count"] == SCALED_BY_WIDTH.get(name):
        width = own["embedding_length"] // own["attention.head_count"]
    if name == "gemma2":
        caps = {key: own.get(key, default) for key, default in SOFTCAPS.items()}
        window = DEFAULT_WINDOW if window is None else window
        check_positive(name, {WINDOW: window, **caps})
    else:
        caps = {"final_logit_softcapping": own.get("final_logit_softcapping") or None}
    return {"query_pre_attn_scalar": width, **_windows(name, own, window or None), **caps}


def _gemma_embedding_config(name: str, own: Settings) -> dict[str, Any]:
    check_positive(name, {WINDOW: own[WINDOW]})
    return _gemma_config(name, own) | {"use_bidirectional_attention": True}


def _olmo_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the windows of OLMo 3; without any, the file holds OLMo 2."""
    window = own.get(WINDOW)
    if not window:
        return {}
    check_positive(name, {WINDOW: window})
    return {"architectures": ["Olmo3ForCausalLM"], **_windows(name, own, window)}


def _cohere_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the norm's epsilon and the factor on logits; 0 means none."""
    config = {
        "layer_norm_eps": own["attention.layer_norm_epsilon"],
        "logit_scale": own.get("logit_scale") or 1.0,
    }
    check_positive(name, {"logit_scale": config["logit_scale"]})
    if name == "command-r":
        return config
    check_positive(name, {WINDOW: own[WINDOW]})
    return config | _windows(name, own, own[WINDOW])


def _exaone_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the windows, which llama.cpp computes for the 32B model only."""
    if own["block_count"] != EXAONE_LAYERS:
        return {"sliding_window": None, "layer_types": None}
    window = own.get(WINDOW, DEFAULT_WINDOW)
    check_positive(name, {WINDOW: window})
    return _windows(name, own, window)


def _gpt_oss_config(name: str, own: Settings) -> dict[str, Any]:
    check_positive(name, {WINDOW: own[WINDOW]})
    return gpt_oss_config(own) | _windows(name, own, own[WINDOW])


def _starcoder_config(name: str, own: Settings) -> dict[str, Any]:
    return {"norm_epsilon": own[LAYER_NORM], "hidden_act": "gelu_pytorch_tanh"}


def _partly_rotated(name: str, own: Settings) -> dict[str, Any]:
    return {"partial_rotary_factor": rotated_share(own)}


def _stablelm_config(name: str, own: Settings) -> dict[str, Any]:
    return {"layer_norm_eps": own[LAYER_NORM], **_partly_rotated(name, own)}


def _qwen2_moe_config(name: str, own: Settings) -> dict[str, Any]:
    inner, shared = expert_sizes(own)
    return {
        "num_experts": own["expert_count"],
        "num_experts_per_tok": own["expert_used_count"],
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
    }


def _delta_config(name: str, own: Settings) -> dict[str, Any]:
    kinds = ("full_attention", "linear_attention")
    key_dim, value_dim = head_sizes(own)
    config = {
        "layer_types": [kinds[recurs] for recurs in recurrent_layers(name, own)],
        "linear_conv_kernel_dim": own["ssm.conv_kernel"],
        "linear_num_key_heads": own["ssm.group_count"],
        "linear_num_value_heads": own["ssm.time_step_rank"],
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        **_partly_rotated(name, own),
    }
    return config | _qwen2_moe_config(name, own) if name in MIXTURES else config


def _mistral_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the class of Ministral 3 if queries are scaled; the scale is with the rotary keys."""
    if not own.get(TEMPERATURE):
        return {}
    check_positive(name, {TEMPERATURE: own[TEMPERATURE]})
    return {"architectures": ["Ministral3ForCausalLM"], "sliding_window": None}


def _granite_config(name: str, own: Settings) -> dict[str, Any]:
    check_positive(name, {key: own[key] for key in SCALES.values() if own.get(key)})
    return granite_config(name, own) if name == GRANITE else granite_scales(name, own)


def check_positive(name: str, values: Settings) -> None:
    for key, value in values.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConfigError(
                f"The GGUF file has {name}.{key} = {value!r:.99}; it must be a number above 0."
            )


def _windows(name: str, own: Settings, window: int | None) -> dict[str, Any]:
    slides = _sliding_layers(name, own) if window else [False] * own["block_count"]
    kinds = ("full_attention", "sliding_attention")
    return {"sliding_window": window, "layer_types": [kinds[slide] for slide in slides]}


def _sliding_layers(name: str, own: Settings) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    layers = own["block_count"]
    given = own.get("attention.sliding_window_pattern", PERIODS[name])
    if isinstance(given, list) and len(given) == layers:
        return [bool(each) for each in given]
    if type(given) is not int or given < 0:
        raise ConfigError(
            f"The GGUF file has {name}.attention.sliding_window_pattern = {given!r:.99}; it must "
            f"be a number such as {PERIODS[name]}, or a list with an entry for each layer."
        )
    return [not given or layer % given < given - 1 for layer in range(layers)]


FAMILIES: dict[str, Callable[[str, Settings], dict[str, Any]]] = {
    **CONFIGS,
    GPT_OSS: _gpt_oss_config,
    "gemma2": _gemma_config,
    "gemma3": _gemma_config,
    GEMMA4: gemma4_config,
    "gemma-embedding": _gemma_embedding_config,
    "olmo2": _olmo_config,
    "command-r": _cohere_config,
    "cohere2": _cohere_config,
    "qwen2moe": _qwen2_moe_config,
    "qwen3next": _delta_config,
    "qwen35": _delta_config,
    "qwen35moe": _delta_config,
    "mistral3": _mistral_config,
    "exaone4": _exaone_config,
    "glm4": _partly_rotated,
    "starcoder2": _starcoder_config,
    "stablelm": _stablelm_config,
    "lfm2": lfm2_config,
    "lfm2moe": lfm2_config,
    **dict.fromkeys(("granite", "granitemoe", GRANITE), _granite_config),
}
