"""Changes that the converter of llama.cpp makes to GPT-NeoX, gpt-oss and Phi-3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

CHANGED = ("gptneox", "gpt-oss", "phi3")


def settings(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Store the settings that only these have. Return the config without them."""
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if architecture != "phi3":
        return config
    writer.add_sliding_window(config["sliding_window"] or 0)
    rope = config["rope_parameters"]
    longest, original = (
        config["max_position_embeddings"],
        config["original_max_position_embeddings"],
    )
    writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        scale = longest / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    given = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return config | {"sliding_window": None, "rope_parameters": given}


def tensors(
    given: Mapping[str, np.ndarray], architecture: str, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, tensor in given.items():
        if ".query_key_value." in name:
            heads = tensor.reshape(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
            found[name] = heads.swapaxes(0, 1).reshape(tensor.shape)
        elif name.endswith(".sinks"):
            found[f"{name}.weight"] = tensor
        elif ".mlp.experts." in name:
            found |= _of_experts(name, tensor)
        else:
            found[name] = tensor
    return found


def _of_experts(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else np.ascontiguousarray(tensor.swapaxes(1, 2))
    base = name.removesuffix("_bias")
    if base.endswith("down_proj"):
        return {f"{base}.{kind}": rows}
    parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    return {f"{base.replace('gate_up_proj', part)}.{kind}": x for part, x in parts.items()}
