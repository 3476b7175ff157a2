"""Architectures that are Llama with few changes: other norms, biases, experts or fused tensors.

Mixtral's files say "llama", and have experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ConfigError

Shape = tuple[int, ...]
Settings = Mapping[str, Any]
Blocks = tuple[dict[str, Shape], dict[str, Shape]]
CLASSES = {
    "arcee": "ArceeForCausalLM",
    "chatglm": "GlmForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
PERMUTED = ("arcee", "smollm3")  # rows of queries and keys, as Llama's
ROTATED, PARALLEL = "rope.dimension_count", "use_parallel_residual"
PARTLY_ROTATED = ("chatglm", "gptneox", "phi3")
EXPERTS = ("expert_count", "expert_used_count")
EXPERT_SIZE = "expert_feed_forward_length"
WINDOW = "attention.sliding_window"
WITH_EXPERTS = ("olmoe", "qwen3moe")
# Keys besides those of every model with rotary embedding.
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("arcee", "seed_oss", "smollm3"), ()),
    "chatglm": (ROTATED,),
    "gptneox": (ROTATED, PARALLEL),
    "olmoe": EXPERTS,
    "phi3": (ROTATED, WINDOW),
    "qwen3moe": (*EXPERTS, EXPERT_SIZE),
}
NEEDED: dict[str, tuple[str, ...]] = {
    "gptneox": (PARALLEL,),
    **dict.fromkeys(WITH_EXPERTS, EXPERTS),
}
WITH_HEAD = ("gptneox", "olmoe")  # llama.cpp requires one
# Names of tensors that differ from Llama's.
MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
NAMES: dict[str, dict[str, str]] = {
    "chatglm": FUSED_MLP,
    "phi3": FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
NEOX_BLOCKS = "gpt_neox.layers"
# Phi-3's factors of frequencies, for long contexts and for others.
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def has_mixtral_experts(name: str, own: Settings) -> bool:
    return name == "llama" and bool(own.get(EXPERTS[0]))


# ---- config.json -----------------------------------------------------------------------------


def rotated_share(own: Settings) -> float:
    """Return the share of each head's dimensions that is rotated."""
    width: int = own["attention.key_length"]
    rotated: int = own.get(ROTATED, width)
    share = rotated / width
    if int(share * width) < rotated:  # the quotient was rounded down
        share = math.nextafter(share, 1.0)
    return share


def mixtral_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the experts of Mixtral; {} for Llama."""
    if not has_mixtral_experts(name, own):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": own[EXPERTS[0]],
        "num_experts_per_tok": own[EXPERTS[1]],
        "sliding_window": None,
    }


def _experts_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the experts. llama.cpp renormalises the weights of Qwen3's only."""
    return {
        "num_experts": own[EXPERTS[0]],
        "num_experts_per_tok": own[EXPERTS[1]],
        "moe_intermediate_size": _expert_size(name, own),
        "norm_topk_prob": name == "qwen3moe",
    }


def _phi3_config(name: str, own: Settings) -> dict[str, Any]:
    window = own.get(WINDOW, 0)
    if type(window) is not int or not 0 <= window < 2**31:
        raise ConfigError(
            f"The GGUF file has phi3.{WINDOW} = {window!r:.99}; it must be a whole number, 0 for "
            "no window."
        )
    original = own.get("rope.scaling.original_context_length") or own["context_length"]
    return {
        "partial_rotary_factor": rotated_share(own),
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
    }


def longrope_config(
    own: Settings, short: list[float], long: list[float], given: Any
) -> dict[str, Any]:
    """Return the scaling of Phi-3, of the factors in its two tensors; {} if both are empty.

    `given` is the scaling by other settings. Raises ConfigError if there is one of them too, or one
    tensor only.
    """
    if not short and not long:
        return {}
    if not short or not long:
        lacking = LONG_FACTORS if short else SHORT_FACTORS
        raise ConfigError(f"The GGUF file lacks the tensor {lacking}; convert the model again.")
    if not all(0 < factor < math.inf for factor in (*short, *long)):
        raise ConfigError(
            f"{SHORT_FACTORS} and {LONG_FACTORS} in the GGUF file must hold numbers above 0."
        )
    kind = (given or {}).get("rope_type")
    if kind not in (None, "longrope"):
        raise ConfigError(
            f"The GGUF file has both {SHORT_FACTORS} and rotary scaling of type {kind!r}. Penstock "
            "serves only one of them."
        )
    factor = own.get("rope.scaling.attn_factor", 1.0)
    return {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": factor,
        }
    }


def _neox_config(name: str, own: Settings) -> dict[str, Any]:
    return {
        "layer_norm_eps": own["attention.layer_norm_epsilon"],
        "hidden_act": "gelu",
        "rotary_pct": rotated_share(own),
        "rotary_emb_base": own.get("rope.freq_base", 10_000.0),
        "use_parallel_residual": bool(own[PARALLEL]),
        "attention_bias": True,
    }


CONFIGS: dict[str, Callable[[str, Settings], dict[str, Any]]] = {
    "llama": mixtral_config,
    "arcee": lambda name, own: {"hidden_act": "relu2"},
    "chatglm": lambda name, own: {"partial_rotary_factor": rotated_share(own)},
    "gptneox": _neox_config,
    "phi3": _phi3_config,
    **dict.fromkeys(WITH_EXPERTS, _experts_config),
}


# ---- tensors ---------------------------------------------------------------------------------


def _expert_size(name: str, own: Settings) -> int:
    """Return the inner size of an expert, with llama.cpp's defaults."""
    inner: int = own["feed_forward_length"]
    if name == "qwen3moe":
        inner = own.get(EXPERT_SIZE, inner // own[EXPERTS[1]])
    return inner


def llama_block(name: str, own: Settings, plain: dict[str, Shape], number: int) -> Blocks:
    """Return the tensors that a block must have, and those it may, from those of Llama's."""
    hidden, inner = own["embedding_length"], own["feed_forward_length"]
    queries, keys = plain["attn_q.weight"][0], plain["attn_k.weight"][0]
    parts = dict(plain)
    optional = {
        f"{part}.bias": plain[f"{part}.weight"][:1] for part in ("attn_q", "attn_k", "attn_v")
    }
    if name in ("gptneox", "phi3"):
        for part in ("attn_q", "attn_k", "attn_v"):
            del parts[f"{part}.weight"]
        parts["attn_qkv.weight"] = (queries + 2 * keys, hidden)
        optional = {}
    if name in ("arcee", "chatglm", "gptneox", "phi3"):
        del parts["ffn_gate.weight"]
    if name in ("chatglm", "phi3"):
        parts["ffn_up.weight"] = (2 * inner, hidden)
    if name == "gptneox":
        parts |= {part.replace("weight", "bias"): shape[:1] for part, shape in parts.items()}
    if name == "seed_oss":
        parts["post_attention_norm.weight"] = parts.pop("ffn_norm.weight")
    if name == "olmoe":
        parts |= {"attn_q_norm.weight": (queries,), "attn_k_norm.weight": (keys,)}
    if name == "qwen3moe":
        width = own["attention.key_length"]
        parts |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (width,))
    if name in WITH_EXPERTS or has_mixtral_experts(name, own):
        for part in ("ffn_gate", "ffn_up", "ffn_down"):
            del parts[f"{part}.weight"]
        parts |= expert_shapes(own, _expert_size(name, own))
    return parts, optional


def expert_shapes(own: Settings, inner: int) -> dict[str, Shape]:
    """Return the shapes of a block's router, and of all its experts together."""
    hidden, count = own["embedding_length"], own[EXPERTS[0]]
    return {
        "ffn_gate_inp.weight": (count, hidden),
        "ffn_gate_exps.weight": (count, inner, hidden),
        "ffn_up_exps.weight": (count, inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
    }
