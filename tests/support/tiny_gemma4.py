"""Tiny GGUF files of Gemma 4: settings and tensors of its three kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HIDDEN, INNER, HEADS = 32, 64, 2
WIDTH, SLIDING_WIDTH, SLIDING_KV_HEADS = 16, 8, 2  # global layers have one head of keys
VOCABULARY = 187
FACTORS = [1.0] * 4 + [1e30] * 4  # half of the pairs of a head are rotated
SLIDES = (True, False, True, False)
SIZE = 32  # of the inputs per layer
READERS = 2  # of the second kind
EXPERTS, EXPERT_INNER = 4, 32
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
Shapes = dict[str, Any]  # a list has the numbers


def settings_of(slides: Sequence[bool] = SLIDES) -> dict[str, Any]:
    """Return the settings of a dense model, without the name of the architecture."""
    return {
        "block_count": len(slides),
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [SLIDING_KV_HEADS if each else 1 for each in slides],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "attention.key_length_swa": SLIDING_WIDTH,
        "attention.value_length_swa": SLIDING_WIDTH,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": list(slides),
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": WIDTH,
        "rope.dimension_count_swa": SLIDING_WIDTH,
    }


def shapes_of(vocabulary: int = VOCABULARY) -> Shapes:
    """Return the tensors of a dense model. In global layers, keys are values."""
    shapes: Shapes = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "rope_freqs.weight": FACTORS,
    }
    for block, slides in enumerate(SLIDES):
        shapes |= _attention(block, slides=slides) | _mlp(block, INNER)
        shapes |= {f"blk.{block}.{norm}.weight": (HIDDEN,) for norm in NORMS}
        shapes[f"blk.{block}.layer_output_scale.weight"] = [0.75 + 0.1 * block]
    return shapes


def values() -> Shapes:
    """Return the values of global layers."""
    return {f"blk.{block}.attn_v.weight": (WIDTH, HIDDEN) for block in (1, 3)}


def shared() -> tuple[dict[str, Any], Shapes]:
    """Return what differs in a model like E2B: inputs per layer, and KV of earlier layers."""
    layers = len(SLIDES)
    changes = {
        "attention.shared_kv_layers": READERS,
        "embedding_length_per_layer_input": SIZE,
        "feed_forward_length": [INNER] * (layers - READERS) + [2 * INNER] * READERS,
    }
    shapes: Shapes = {
        "per_layer_token_embd.weight": (VOCABULARY, layers * SIZE),
        "per_layer_model_proj.weight": (layers * SIZE, HIDDEN),
        "per_layer_proj_norm.weight": (SIZE,),
        "blk.1.attn_v.weight": (WIDTH, HIDDEN),
    }
    for block in range(layers):
        shapes |= {
            f"blk.{block}.inp_gate.weight": (SIZE, HIDDEN),
            f"blk.{block}.proj.weight": (HIDDEN, SIZE),
            f"blk.{block}.post_norm.weight": (HIDDEN,),
        }
    for block in range(layers - READERS, layers):
        shapes |= _mlp(block, 2 * INNER)
        for part in ("attn_k", "attn_v", "attn_k_norm"):
            shapes[f"blk.{block}.{part}.weight"] = None
    return changes, shapes


def experts() -> tuple[dict[str, Any], Shapes]:
    """Return what differs in a model with experts."""
    changes = {
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT_INNER,
    }
    shapes: Shapes = {}
    for block in range(len(SLIDES)):
        parts = {
            "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
            "ffn_gate_inp.scale": (HIDDEN,),
            "ffn_gate_up_exps.weight": (EXPERTS, 2 * EXPERT_INNER, HIDDEN),
            "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_INNER),
            "ffn_down_exps.scale": (EXPERTS,),
            "pre_ffw_norm_2.weight": (HIDDEN,),
            "post_ffw_norm_1.weight": (HIDDEN,),
            "post_ffw_norm_2.weight": (HIDDEN,),
        }
        shapes |= {f"blk.{block}.{part}": shape for part, shape in parts.items()}
    return changes, shapes


def _attention(block: int, *, slides: bool) -> Shapes:
    width, kv_heads = (SLIDING_WIDTH, SLIDING_KV_HEADS) if slides else (WIDTH, 1)
    parts: Shapes = {
        "attn_q": (HEADS * width, HIDDEN),
        "attn_k": (kv_heads * width, HIDDEN),
        "attn_output": (HIDDEN, HEADS * width),
        "attn_q_norm": (width,),
        "attn_k_norm": (width,),
    }
    if slides:
        parts["attn_v"] = (kv_heads * width, HIDDEN)
    return {f"blk.{block}.{part}.weight": shape for part, shape in parts.items()}


def _mlp(block: int, inner: int) -> Shapes:
    return {
        f"blk.{block}.ffn_gate.weight": (inner, HIDDEN),
        f"blk.{block}.ffn_up.weight": (inner, HIDDEN),
        f"blk.{block}.ffn_down.weight": (HIDDEN, inner),
    }
