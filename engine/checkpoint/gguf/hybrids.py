"""Architectures with recurrent layers: LFM2 with and without experts.

A layer is recurrent if `attention.head_count_kv` is 0 for it.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.gguf.settings import (
    L_CACHE,
    LEADING_DENSE,
    RECURRENT,
    RMS,
    ROUTING,
    Settings,
)
from engine.errors import ConfigError

Shape = tuple[int, ...]
SIGMOID = 2  # llama.cpp's number of this kind of routing
LFM2_NAMES = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{e}.w1",
    "ffn_up_exps": "feed_forward.experts.{e}.w3",
    "ffn_down_exps": "feed_forward.experts.{e}.w2",
}


def lfm2_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the kinds of the layers, and the experts. Raises ConfigError for another routing."""
    config = {
        "norm_eps": own[RMS],
        "block_auto_adjust_ff_dim": False,  # the file has the width that is computed
        "conv_L_cache": own[L_CACHE],
        "layer_types": [("full_attention", "conv")[each] for each in own[RECURRENT]],
    }
    if name == "lfm2":
        return config
    if own[ROUTING] != SIGMOID:
        raise ConfigError(
            f"The GGUF file has lfm2moe.{ROUTING} = {own[ROUTING]!r:.99}; served is {SIGMOID}, "
            "sigmoids."
        )
    return config | {
        "num_dense_layers": own[LEADING_DENSE],
        "num_experts": own["expert_count"],
        "num_experts_per_tok": own["expert_used_count"],
        "moe_intermediate_size": own["expert_feed_forward_length"],
    }


def lfm2_block(
    name: str, own: Settings, plain: dict[str, Shape], number: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the tensors that block `number` must have, and those it may, from those of Llama's."""
    hidden = own["embedding_length"]
    width = own["attention.key_length"]
    parts = {
        part: shape
        for part, shape in plain.items()
        if not (own[RECURRENT][number] and part.startswith("attn_") and part != "attn_norm.weight")
    }
    if own[RECURRENT][number]:
        parts["shortconv.conv.weight"] = (hidden, own[L_CACHE])
        parts["shortconv.in_proj.weight"] = (3 * hidden, hidden)
        parts["shortconv.out_proj.weight"] = (hidden, hidden)
    else:
        parts |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (width,))
    if name == "lfm2" or number < own[LEADING_DENSE]:
        return parts, {}
    count, inner = own["expert_count"], own["expert_feed_forward_length"]
    for part in ("ffn_gate", "ffn_up", "ffn_down"):
        del parts[f"{part}.weight"]
    parts |= {
        "ffn_gate_inp.weight": (count, hidden),
        "exp_probs_b.bias": (count,),
        "ffn_gate_exps.weight": (count, inner, hidden),
        "ffn_up_exps.weight": (count, inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
    }
    return parts, {}
