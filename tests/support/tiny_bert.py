"""A BERT with random weights in Hugging Face layout, small enough for any test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def tiny_bert(folder: Path, **overrides: Any) -> Path:
    config = {
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "type_vocab_size": 2,
        "max_position_embeddings": 96,
        "layer_norm_eps": 1e-12,
    } | overrides
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings": (config["vocab_size"], hidden),
        "embeddings.position_embeddings": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings": (config["type_vocab_size"], hidden),
        "embeddings.LayerNorm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        linears = ("attention.self.query", "attention.self.key", "attention.self.value")
        shapes |= {f"{prefix}.{name}": (hidden, hidden) for name in linears}
        shapes |= {
            f"{prefix}.attention.output.dense": (hidden, hidden),
            f"{prefix}.attention.output.LayerNorm": (hidden,),
            f"{prefix}.intermediate.dense": (inner, hidden),
            f"{prefix}.output.dense": (hidden, inner),
            f"{prefix}.output.LayerNorm": (hidden,),
        }
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(*shape, generator=generator)
        weights[f"{name}.weight"] = 1 + noise / 2 if len(shape) == 1 else noise * 2 * hidden**-0.5
        if not name.endswith("_embeddings"):
            weights[f"{name}.bias"] = torch.randn(shape[0], generator=generator) / 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
