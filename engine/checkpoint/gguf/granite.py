"""Granite in GGUF files: dense, with experts, and Granite 4 with Mamba-2 in most layers.

A layer of Granite 4 without key/value heads is recurrent. llama.cpp's converter takes gates and ups
apart, and stores -exp(A_log). It reorders the rows of queries and keys as Llama's, also in models
without rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError

Shape = tuple[int, ...]
Settings = Mapping[str, Any]
GRANITE = "granitehybrid"
ROTATES = "rope.scaling.finetuned"  # whether attention has rotary embeddings
SHARED_SIZE = "expert_shared_feed_forward_length"
SCALES = {  # a key of config.json -> the setting; 0 is none
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
KEYS = (ROTATES, *SCALES.values())
NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    **dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), "shared_mlp.input_linear"),
    **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
WHOLE_NAMES = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
# The rows of these tensors follow each other in one of a checkpoint, expert by expert.
JOINED: dict[str, tuple[str, ...]] = {
    "ffn_gate": ("ffn_gate", "ffn_up"),
    "ffn_gate_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
    "ffn_gate_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ffn_down_exps": ("ffn_down_exps",),
}
BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")


def take_experts(own: dict[str, Any]) -> None:
    """Remove the counts of a model without experts, which are 0.

    Raises ConfigError if a key of experts is missing, or that for positions is malformed.
    """
    if type(own.get(ROTATES, True)) is not bool:
        raise ConfigError(
            f"The GGUF file has {GRANITE}.{ROTATES} = {own[ROTATES]!r:.99}; it must be true or "
            "false."
        )
    if own.get("expert_count", 0) == 0:
        own.pop("expert_count", None)
        own.pop("expert_used_count", None)
        return
    for key in ("expert_used_count", SHARED_SIZE):
        if key not in own:
            raise ConfigError(f"The GGUF file lacks {GRANITE}.{key}; convert the model again.")


def granite_scales(name: str, own: Settings) -> dict[str, Any]:
    """Return the multipliers. Raises ConfigError if a model without Mamba-2 has no positions."""
    if name != GRANITE and own.get(ROTATES, True) is not True:
        raise ConfigError(
            f"The GGUF file has {name}.{ROTATES} = {own[ROTATES]!r:.99}; Penstock serves {name} "
            "models with rotary embeddings."
        )
    scales = {key: own.get(given) or 1.0 for key, given in SCALES.items()}
    if not own.get("attention.scale"):
        scales["attention_multiplier"] = own["attention.key_length"] ** -0.5
    if name == "granitemoe":
        scales["num_local_experts"] = own["expert_count"]
        scales["num_experts_per_tok"] = own["expert_used_count"]
    return scales


def granite_config(name: str, own: Settings) -> dict[str, Any]:
    """Return the kinds of the layers, the multipliers and the experts.

    Raises ConfigError if the sizes do not fit.
    """
    hidden, inner = own["embedding_length"], own["ssm.inner_size"]
    heads, groups = own["ssm.time_step_rank"], own["ssm.group_count"]
    if inner % hidden or inner % heads or inner % groups:
        raise ConfigError(
            f"The GGUF file has {name}.ssm.inner_size {inner}, which must be a multiple of its "
            f"embedding_length {hidden}, ssm.time_step_rank {heads} and ssm.group_count {groups}."
        )
    kinds = ("full_attention", "linear_attention")
    return {
        **granite_scales(name, own),
        "layer_types": [kinds[recurs] for recurs in own["recurrent"]],
        "position_embedding_type": "rope" if own.get(ROTATES, True) else "nope",
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": own["ssm.state_size"],
        "mamba_d_conv": own["ssm.conv_kernel"],
        "shared_intermediate_size": _shared_size(own),
        "num_local_experts": own.get("expert_count", 0),
        "num_experts_per_tok": own.get("expert_used_count", 0),
    }


def granite_block(
    name: str, own: Settings, plain: dict[str, Shape], number: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return the tensors that block `number` must have, and those it may, from those of Llama's."""
    hidden = own["embedding_length"]
    required: dict[str, Shape] = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        **(_experts(own) if name == "granitemoe" else _feed_forward(own)),
    }
    if name == "granitemoe" or not own["recurrent"][number]:
        required |= {f"{part}.weight": plain[f"{part}.weight"] for part in BIASED}
        return required, {f"{part}.bias": plain[f"{part}.weight"][:1] for part in BIASED}
    inner = own["ssm.inner_size"]
    heads, groups = own["ssm.time_step_rank"], own["ssm.group_count"]
    channels = inner + 2 * groups * own["ssm.state_size"]
    required |= {
        "ssm_in.weight": (inner + channels + heads, hidden),
        "ssm_conv1d.weight": (channels, own["ssm.conv_kernel"]),
        "ssm_a": (heads, 1),
        "ssm_d": (heads, 1),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (hidden, inner),
    }
    return required, {"ssm_conv1d.bias": (channels,)}


def _shared_size(own: Settings) -> int:
    """Return the width of the network that every token uses."""
    key = SHARED_SIZE if "expert_count" in own else "feed_forward_length"
    size: int = own[key]
    return size


def _feed_forward(own: Settings) -> dict[str, Shape]:
    """Return the shapes of the network that every token uses, and of the experts, if any."""
    hidden, shared = own["embedding_length"], _shared_size(own)
    has_experts = "expert_count" in own
    ending = "_shexp" if has_experts else ""
    parts: dict[str, Shape] = {
        f"ffn_gate{ending}.weight": (shared, hidden),
        f"ffn_up{ending}.weight": (shared, hidden),
        f"ffn_down{ending}.weight": (hidden, shared),
    }
    return parts | _experts(own) if has_experts else parts


def _experts(own: Settings) -> dict[str, Shape]:
    """Return the shapes of a block's router, and of all its experts together."""
    hidden, inner = own["embedding_length"], own["feed_forward_length"]
    count = own["expert_count"]
    return {
        "ffn_gate_inp.weight": (count, hidden),
        "ffn_gate_exps.weight": (count, inner, hidden),
        "ffn_up_exps.weight": (count, inner, hidden),
        "ffn_down_exps.weight": (count, hidden, inner),
    }
