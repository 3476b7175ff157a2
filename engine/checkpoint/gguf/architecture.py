"""The config.json and the tensor names of a GGUF file's model.

llama.cpp's converter renames tensors, and changes some: it reorders the rows of Llama's queries and
keys for its rotary embedding, and adds 1 to Gemma's norms. Both are undone here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA2_NAMES = LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# Mistral's files say "llama". These settings stand for the config's under another name, after the
# architecture's.
SHARED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
GPT2_SHARED = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
GEMMAS = ("gemma", "gemma2", "gemma3")
# Layers of the Gemmas of 27B parameters, whose attention is scaled by hidden / heads.
GEMMA3_PERIOD = 6  # every sixth layer has no window
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_POSITIONS = 1.0, 4.0, 8192  # of every released Llama 3
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
Settings = Mapping[str, Any]


def architecture_of(settings: Settings) -> str:
    """Return the value of general.architecture. Raises ConfigError if it is not served."""
    name = settings.get("general.architecture")
    if name not in CLASSES:
        raise ConfigError(
            f"The GGUF architecture {name!r:.99} is not served; served are {', '.join(CLASSES)}."
        )
    return str(name)


def config_of(settings: Settings, vocab_size: int, *, tied: bool) -> dict[str, Any]:
    """Return the config.json. `tied`: the file has no tensor of the head.

    Raises ConfigError if a setting is missing or asks for what is not served.
    """
    name = architecture_of(settings)
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items()}
    if own.get("expert_count"):
        raise ConfigError("This GGUF file holds a mixture of experts, which is not served.")
    shared = GPT2_SHARED if name == "gpt2" else SHARED
    config = {key: own[given] for key, given in shared.items() if given in own}
    config |= {
        "architectures": [CLASSES[name]],
        "model_type": "gemma3_text" if name == "gemma3" else name,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    for key, given in (
        ("bos_token_id", "bos"),
        ("eos_token_id", "eos"),
        ("pad_token_id", "padding"),
    ):
        config[key] = own.get(f"tokenizer.ggml.{given}_token_id")
    if name == "gpt2":
        return config | {"activation_function": "gelu_new"}
    config["hidden_act"] = "gelu_pytorch_tanh" if name in GEMMAS else "silu"
    config["rope_scaling"] = _rope_scaling(own)
    _check_rotary(own)
    if name in SCALED_BY_WIDTH:
        config |= _gemma_config(name, own)
    return config


def _check_rotary(own: Settings) -> None:
    """Raise ConfigError if only a part of each head is rotated: no served model does that."""
    rotated, width = own.get("rope.dimension_count"), own.get("attention.key_length")
    heads = own.get("attention.head_count")
    if width is None and type(heads) is int and heads > 0:
        width = own.get("embedding_length", 0) // heads
    if rotated is not None and rotated != width:
        raise ConfigError(
            f"The GGUF file rotates {rotated!r:.99} of {width!r:.99} dimensions of a head "
            "(rope.dimension_count), which is not served."
        )


def _rope_scaling(own: Settings) -> dict[str, Any] | None:
    old = own.get("rope.scale_linear")  # files from before rope.scaling.type
    kind = own.get("rope.scaling.type", "linear" if old else "none")
    factor = own.get("rope.scaling.factor", old)
    if kind == "none" or not factor:
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"The GGUF file has rope.scaling.type {kind!r:.99}, which is not served.")
    original = own.get("rope.scaling.original_context_length")
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _gemma_config(name: str, own: Settings) -> dict[str, Any]:
    period = own.get("attention.sliding_window_pattern", GEMMA3_PERIOD)
    width = own.get("attention.key_length")
    if own.get("block_count") == SCALED_BY_WIDTH[name]:
        width = own.get("embedding_length", 0) // max(own.get("attention.head_count", 1), 1)
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": own.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": own.get("attn_logit_softcapping"),
        "final_logit_softcapping": own.get("final_logit_softcapping"),
        **({"sliding_window_pattern": period} if name == "gemma3" else {}),
        "rope_local_base_freq": own.get("rope.freq_base_swa"),
    }


def llama3_scaling(factors: list[float], theta: Any) -> dict[str, Any]:
    """Return the rope_scaling that divides the frequencies by these factors [head_dim / 2].

    Files of Llama 3.1 and later hold the factors instead of the settings that they follow from.
    Raises ConfigError if they follow from none that is known.
    """
    if type(theta) not in (int, float) or not all(0 < x < math.inf for x in (theta, *factors)):
        raise ConfigError(f"{ROPE_FACTORS} and rope.freq_base need numbers above 0.")
    factor = max(factors, default=1.0)
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (index / len(factors))
        if not math.isclose(found, _llama3_factor(wavelength, factor), rel_tol=1e-3):
            raise ConfigError(f"{ROPE_FACTORS} holds frequencies other than those of Llama 3.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_POSITIONS,
    }


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Return what the frequency of this wavelength is divided by."""
    share = (LLAMA3_POSITIONS / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = min(max(share, 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


# ---- tensors ---------------------------------------------------------------------------------


def tensor_name(name: str, architecture: str) -> str:
    """Return the tensor's name in a Hugging Face checkpoint. Unknown names stay as they are."""
    names = GPT2_NAMES if architecture == "gpt2" else LLAMA_NAMES
    if architecture in SCALED_BY_WIDTH:
        names = GEMMA2_NAMES
    base, _, ending = name.rpartition(".")
    block = BLOCK.fullmatch(base)
    known = names.get(block[2] if block else base)
    if known is None:
        return name
    blocks = "h" if architecture == "gpt2" else "model.layers"
    return f"{blocks}.{block[1]}.{known}.{ending}" if block else f"{known}.{ending}"


def row_order(name: str, architecture: str, settings: Settings) -> int | None:
    """Return the number of heads if the tensor's rows were reordered per head, else None."""
    if architecture != "llama":
        return None
    heads = settings.get("llama.attention.head_count")
    if ".attn_q." in name:
        return heads
    return settings.get("llama.attention.head_count_kv", heads) if ".attn_k." in name else None


def stored_offset(name: str, architecture: str) -> float:
    """Return what the converter has added to the tensor."""
    return 1.0 if architecture in GEMMAS and name.endswith("norm.weight") else 0.0


def is_transposed(name: str, architecture: str) -> bool:
    """Return whether a Hugging Face checkpoint stores the transposed tensor: GPT-2's Conv1D."""
    matrices = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return architecture == "gpt2" and name.endswith(matrices)
