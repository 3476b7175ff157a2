"""The settings and tensors of tiny GGUF files of Granite 4. The second of three layers attends."""

from __future__ import annotations

from typing import Any

HIDDEN, INNER, WIDTH, LAYERS = 32, 64, 16, 3
HEADS, GROUPS, STATE, TAPS = 4, 2, 8, 4
EXPERTS, EXPERT_INNER, SHARED = 4, 32, 48
SSM = 2 * HIDDEN
CHANNELS = SSM + 2 * GROUPS * STATE


def settings_of() -> dict[str, Any]:
    """Return the settings of a dense model, without the architecture's name."""
    return {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 2,
        "attention.head_count_kv": [0, 1, 0],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "attention.scale": 0.4,
        "embedding_scale": 3.0,
        "residual_scale": 0.6,
        "logit_scale": 0.5,
        "ssm.conv_kernel": TAPS,
        "ssm.state_size": STATE,
        "ssm.group_count": GROUPS,
        "ssm.time_step_rank": HEADS,
        "ssm.inner_size": SSM,
        "rope.scaling.finetuned": False,
    }


def shapes_of(tokens: int) -> dict[str, Any]:
    """Return the shape of each tensor of a dense model by its name, or a list of its numbers."""
    shapes: dict[str, Any] = {
        "token_embd.weight": (tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    attention = {
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (WIDTH, HIDDEN),
        "attn_v.weight": (WIDTH, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
    }
    recurrent = {
        "ssm_in.weight": (SSM + CHANNELS + HEADS, HIDDEN),
        "ssm_conv1d.weight": (CHANNELS, TAPS),
        "ssm_conv1d.bias": (CHANNELS,),
        "ssm_a": [[-0.1], [-0.5], [-1.0], [-3.0]],
        "ssm_d": (HEADS, 1),
        "ssm_dt.bias": (HEADS,),
        "ssm_norm.weight": (GROUPS, SSM // GROUPS),
        "ssm_out.weight": (HIDDEN, SSM),
    }
    others = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    for block in range(LAYERS):
        parts = others | (attention if block == 1 else recurrent)
        shapes |= {f"blk.{block}.{part}": shape for part, shape in parts.items()}
    return shapes


def experts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what differs in a model with experts: settings, and shapes of tensors."""
    settings = {
        "feed_forward_length": EXPERT_INNER,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": SHARED,
    }
    parts: dict[str, Any] = {
        **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down")),
        "ffn_gate_inp": (EXPERTS, HIDDEN),
        "ffn_gate_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
        "ffn_up_exps": (EXPERTS, EXPERT_INNER, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_INNER),
        "ffn_gate_shexp": (SHARED, HIDDEN),
        "ffn_up_shexp": (SHARED, HIDDEN),
        "ffn_down_shexp": (HIDDEN, SHARED),
    }
    blocks = range(LAYERS)
    tensors = {f"blk.{i}.{part}.weight": parts[part] for i in blocks for part in parts}
    return settings, tensors
