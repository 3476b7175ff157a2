"""A Qwen3 with random weights in Hugging Face layout, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = 2


def tiny_qwen3(folder: Path, *, begins: str = "model.", **overrides: Any) -> Path:
    """Write it to `folder`. Tensors have names that begin with `begins`; a bare model has none."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if begins else "Qwen3Model"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 645,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    } | overrides
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config["vocab_size"], hidden),
        "norm": (hidden,),
    }
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(*shape, generator=generator)
        scaled = 1 + noise / 2 if len(shape) == 1 else noise * 2 * shape[-1] ** -0.5
        weights[f"{begins}{name}.weight"] = scaled
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
