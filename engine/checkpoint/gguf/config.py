"""The config.json of a GGUF file's model, from its settings and the names of its tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from engine.checkpoint.gguf.encoders import bert_config
from engine.checkpoint.gguf.end_tokens import token_id
from engine.checkpoint.gguf.families import GEMMAS, WINDOW, check_positive, family_config
from engine.checkpoint.gguf.gemma4 import GEMMA4, SLIDING_WIDTH, proportional, tensors_config
from engine.checkpoint.gguf.gpt_oss import GPT_OSS
from engine.checkpoint.gguf.granite import GRANITE
from engine.checkpoint.gguf.latent import LATENT, MULTIPLIER, latent_config
from engine.checkpoint.gguf.settings import (
    BERTS,
    CLASSES,
    COMPUTED,
    RMS,
    ROTATED,
    TEMPERATURE,
    YARN,
    Settings,
    architecture_of,
    own_settings,
)
from engine.checkpoint.gguf.shapes import ATTENTION, MLP, has_bias, in_all_blocks
from engine.errors import ConfigError

# Mistral's files say "llama". These settings stand for the config's under another name.
SHARED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
GPT2_SHARED = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
# Windowed layers have a base of their own, and no scaling.
OWN_BASE = ("gemma3", GEMMA4, "gemma-embedding", "modern-bert")
ONE_BASE = (
    "gemma2",
    "olmo2",
    "cohere2",
    "exaone4",
    GPT_OSS,
)  # windowed layers have the base of the others
THETA = 10_000.0  # llama.cpp's default
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_POSITIONS = 1.0, 4.0, 8192  # of every released Llama 3


def config_of(
    settings: Settings,
    vocab_size: int,
    tensors: Collection[str] = (),
    factors: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the config.json.

    `tensors` are the names of all tensors. `factors` divide the rotary frequencies
    (rope_freqs.weight). Raises ConfigError if a setting is missing or not served.
    """
    name, own = architecture_of(settings), own_settings(settings)
    shared = GPT2_SHARED if name == "gpt2" else SHARED
    config: dict[str, Any] = {key: own[given] for key, given in shared.items()}
    if RMS in COMPUTED[name]:
        config["rms_norm_eps"] = own[RMS]
    config |= {
        "architectures": [CLASSES[name]],
        "model_type": "gemma3_text" if name in ("gemma3", "gemma-embedding") else name,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
    }
    for key, given in {"bos_token_id": "bos", "pad_token_id": "padding"}.items():
        config[key] = token_id(settings, given, vocab_size)
    if name == "gpt2":
        return config | {"activation_function": "gelu_new"}
    if name in BERTS:
        rotary = {} if name == "bert" else _rotary(name, own, factors)
        return config | rotary | bert_config(name, settings, own, tensors)
    config["hidden_act"] = "gelu_pytorch_tanh" if name in GEMMAS else "silu"
    config["attention_bias"] = has_bias(tensors, (*ATTENTION, "attn_output"))
    config["mlp_bias"] = has_bias(tensors, MLP)
    config |= _rotary(name, own, factors)
    if name in ("starcoder2", "stablelm", GRANITE, LATENT):
        config |= _keys_of_tensors(name, own, tensors)
    if name == GEMMA4:
        config |= tensors_config(own, vocab_size, tensors)
    return config | family_config(name, own)


def _keys_of_tensors(name: str, own: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Return what the tensors say of models whose biases, norms or experts have their own keys."""
    if name == LATENT:
        return latent_config(name, own, tensors)
    if name == GRANITE:
        return {"mamba_conv_bias": has_bias(tensors, ("ssm_conv1d",))}
    if name == "starcoder2":
        return {"use_bias": True}
    return {
        "use_qkv_bias": has_bias(tensors, ATTENTION),
        "use_parallel_residual": not in_all_blocks("ffn_norm", own, tensors),
        "qk_layernorm": in_all_blocks("attn_q_norm", own, tensors),
    }


# ---- rotary embedding ------------------------------------------------------------------------


def _rotary(name: str, own: Settings, factors: Sequence[float]) -> dict[str, Any]:
    """Return rope_theta, and how the frequencies and the scores are scaled.

    llama.cpp multiplies cosines and sines by rope.scaling.attn_factor with every type of scaling.
    Of the scalings in a config.json, longrope and yarn have such a factor.
    """
    theta = own.get("rope.freq_base", THETA)
    local = own.get("rope.freq_base_swa", THETA if name in OWN_BASE else theta)
    attention_factor = own.get("rope.scaling.attn_factor", 1.0)
    scaling = _scaling(name, own, theta, factors)
    if name in ONE_BASE and local != theta:
        raise ConfigError(
            f"The GGUF file has {name}.rope.freq_base_swa = {local!r:.99}, another base than its "
            f"rope.freq_base, {theta!r:.99}. Penstock serves {name} models with one base only."
        )
    if name == "gemma2" and own.get("rope.scaling.type") == "none" and _factor(own) != 1:
        raise ConfigError(
            "The GGUF file has gemma2.rope.scaling.type = 'none' and a rope.scaling.factor, which "
            "llama.cpp applies to layers with a window only. Penstock serves files with 'linear', "
            "or without the factor."
        )
    if own.get(TEMPERATURE):
        scaling = (scaling or {"rope_type": "default"}) | {
            "llama_4_scaling_beta": own[TEMPERATURE],
            "original_max_position_embeddings": _original_length(own),
        }
    if name not in OWN_BASE and not (name == "olmo2" and own.get(WINDOW)):
        return {"rope_theta": theta, "rope_scaling": scaling}
    is_scaled = name in OWN_BASE and attention_factor != 1  # also in windowed layers
    width = own.get(SLIDING_WIDTH, own["attention.key_length"])
    unscaled = _by_factors(own, width, [1.0], attention_factor) if is_scaled else {}
    kinds = {"full_attention": (scaling, theta), "sliding_attention": (unscaled, local)}
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", **(given or {}), "rope_theta": base}
            for kind, (given, base) in kinds.items()
        }
    }


def _factor(own: Settings) -> Any:
    """Return the factor of the positions. Old files have it under another name."""
    return own.get("rope.scaling.factor", own.get("rope.scale_linear")) or 1.0


def _scaling(
    name: str, own: Settings, theta: float, factors: Sequence[float]
) -> dict[str, Any] | None:
    """Return the scaling of the frequencies, or None."""
    kind = own.get("rope.scaling.type", "linear")
    factor = _factor(own)
    attention_factor = own.get("rope.scaling.attn_factor", 1.0)
    check_positive(name, {"rope.scaling.factor": factor})
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"The GGUF file has {name}.rope.scaling.type = {kind!r:.99}, which is not served; "
            "served are 'none', 'linear' and 'yarn'."
        )
    if name == LATENT and kind == "linear" and factor != 1:
        raise ConfigError(
            f"The GGUF file has {name}.rope.scaling.type = 'linear', for which llama.cpp scales "
            "attention as for yarn. Penstock serves yarn for these models."
        )
    if kind == "yarn":
        return _yarn(name, own, factor, attention_factor, factors)
    factor = factor if kind == "linear" else 1.0
    if name == GEMMA4 and attention_factor == 1 and (found := proportional(factors, factor)):
        return found
    width = own.get(ROTATED, own["attention.key_length"])
    if factor == attention_factor == 1 and factors:
        if not _is_llama3(factors, theta):
            return _by_factors(own, width, factors, 1.0)
        return {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": LLAMA3_POSITIONS,
        }
    if factors or attention_factor != 1:
        each = [factor * given for given in factors or [1.0]]
        return _by_factors(own, width, each, attention_factor)
    return {"rope_type": "linear", "factor": factor} if factor != 1 else None


def _yarn(
    name: str, own: Settings, factor: float, attention_factor: float, factors: Sequence[float]
) -> dict[str, Any] | None:
    if factors:
        raise ConfigError(
            f"The GGUF file has both {name}.rope.scaling.type = 'yarn' and the tensor "
            "rope_freqs.weight. Penstock serves only one of them."
        )
    if factor < 1:
        raise ConfigError(
            f"The GGUF file has {name}.rope.scaling.factor = {factor!r:.99}; Penstock serves yarn "
            "with factors from 1 on."
        )
    growth = 0.1 * math.log(factor)
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": (growth + 1) * attention_factor,
        "original_max_position_embeddings": _original_length(own),
    }
    if name == GPT_OSS:
        return found | {"truncate": False}  # of every released model; llama.cpp truncates
    if name == LATENT:
        multiplier = own.get(MULTIPLIER) or 0.0
        check_positive(name, {MULTIPLIER: multiplier} if multiplier else {})
        del found["attention_factor"]  # by both of these; without them it is that of yarn
        return found | dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / 0.1)
    if name != "mistral3":
        return found
    given = {key: own[key] for key in YARN if own.get(key)}
    check_positive(name, given)
    multiplier, *betas = (given.get(key) for key in YARN)
    if multiplier is not None:
        found["attention_factor"] /= multiplier * growth + 1
    named = zip(("beta_fast", "beta_slow"), betas, strict=True)
    return found | {key: beta for key, beta in named if beta is not None}


def _original_length(own: Settings) -> int:
    """Return the length of contexts that frequencies and queries are scaled from."""
    length: int = own.get("rope.scaling.original_context_length") or own["context_length"]
    return length


def _by_factors(
    own: Settings, width: int, factors: Sequence[float], attention_factor: float
) -> dict[str, Any]:
    """Return the scaling that divides each frequency by its own factor: longrope with one list.

    `width` dimensions of a head are rotated.
    """
    count = width // 2
    each = list(factors) if len(factors) > 1 else [*factors] * count
    if len(each) != count or not all(0 < factor < math.inf for factor in each):
        raise ConfigError(
            f"The GGUF file needs {count} numbers above 0 in rope_freqs.weight, half the width of "
            f"a head; it has {len(each)}."
        )
    return {
        "rope_type": "longrope",
        "short_factor": each,
        "long_factor": each,
        "factor": 1.0,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": own["context_length"],
    }


def _is_llama3(factors: Sequence[float], theta: float) -> bool:
    """Return whether the factors [head_dim / 2] follow from the settings of Llama 3.

    Files of Llama 3.1 and later hold the factors instead of these settings.
    """
    if not all(0 < factor < math.inf for factor in factors):
        return False
    most = max(factors)
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (index / len(factors))
        if not math.isclose(found, _llama3_factor(wavelength, most), rel_tol=1e-3):
            return False
    return True


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Return what the frequency of this wavelength is divided by."""
    share = (LLAMA3_POSITIONS / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = min(max(share, 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
