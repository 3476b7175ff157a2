"""A tiny model whose layers are in several KV groups: one sees all tokens, two have a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.driver import tiny_llama


def windowed_qwen2(folder: Path) -> Path:
    """Write a Qwen2 with one full layer and two with a window."""
    settings: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
    settings |= {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    tiny_llama(folder, **settings)
    weights = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.removesuffix("weight") + "bias"] = torch.full((len(weight),), 0.1)
    save_file(weights, folder / "model.safetensors")
    return folder
