"""The settings and tensors of tiny GGUF files of DeepSeek-V3 and V2. The first layer is dense."""

from __future__ import annotations

from typing import Any

HIDDEN, INNER, LAYERS, HEADS = 32, 64, 3, 2
LATENT, QUERY, PLAIN, ROTATED, VALUE = 24, 16, 8, 8, 12
EXPERTS, EXPERT_INNER, SHARED = 4, 32, 2
KEY = PLAIN + ROTATED
BLOCKS = range(LAYERS)


def settings_of() -> dict[str, Any]:
    """Return the settings of a V3, without the architecture's name."""
    return {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
        "rope.dimension_count": ROTATED,
        "attention.q_lora_rank": QUERY,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROTATED,
        "attention.value_length": LATENT,
        "attention.key_length_mla": KEY,
        "attention.value_length_mla": VALUE,
        "leading_dense_block_count": 1,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT_INNER,
        "expert_shared_count": SHARED,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }


def shapes_of(tokens: int) -> dict[str, Any]:
    """Return the shape of each tensor of a V3, by its name."""
    shapes: dict[str, Any] = {
        "token_embd.weight": (tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (tokens, HIDDEN),
    }
    attention = {
        "attn_norm": (HIDDEN,),
        "attn_q_a": (QUERY, HIDDEN),
        "attn_q_a_norm": (QUERY,),
        "attn_q_b": (HEADS * KEY, QUERY),
        "attn_kv_a_mqa": (LATENT + ROTATED, HIDDEN),
        "attn_kv_a_norm": (LATENT,),
        "attn_k_b": (HEADS, LATENT, PLAIN),
        "attn_v_b": (HEADS, VALUE, LATENT),
        "attn_output": (HIDDEN, HEADS * VALUE),
        "ffn_norm": (HIDDEN,),
    }
    dense = {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shared = SHARED * EXPERT_INNER
    mixture = {
        "ffn_gate_inp": (EXPERTS, HIDDEN),
        "ffn_gate_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
        "ffn_up_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_INNER),
        "ffn_gate_shexp": (shared, HIDDEN),
        "ffn_up_shexp": (shared, HIDDEN),
        "ffn_down_shexp": (HIDDEN, shared),
    }
    for block in BLOCKS:
        parts = attention | (mixture if block else dense)
        shapes |= {f"blk.{block}.{part}.weight": shape for part, shape in parts.items()}
        if block:
            shapes[f"blk.{block}.exp_probs_b.bias"] = (EXPERTS,)
    return shapes


def of_v2() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what differs in a V2: settings, and shapes of tensors."""
    settings = {"expert_gating_func": 1, "expert_weights_norm": None}
    return settings, {f"blk.{block}.exp_probs_b.bias": None for block in BLOCKS}


def old() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what differs in an old file: settings, and shapes of tensors."""
    settings = {
        "attention.head_count_kv": HEADS,
        "attention.key_length": KEY,
        "attention.value_length": VALUE,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    tensors: dict[str, Any] = {}
    for block in BLOCKS:
        tensors |= dict.fromkeys([f"blk.{block}.attn_{part}_b.weight" for part in "kv"])
        tensors[f"blk.{block}.attn_kv_b.weight"] = (HEADS * (PLAIN + VALUE), LATENT)
    return settings, tensors
