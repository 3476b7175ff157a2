"""Write LoRA adapters in PEFT's format, and base models into which one is folded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
ALL = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
Tensors = dict[str, torch.Tensor]


def low_rank_tensors(
    base: Path, rank: int, seed: int, modules: tuple[str, ...] = ALL, size: float = 0.5
) -> Tensors:
    """Return random lora_A and lora_B for these modules of every layer of a Llama folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            out, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(out, rank, generator=generator) * size * rank**-0.5
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter folder. The rank is that of the first tensor unless `config` has one."""
    rank = next(iter(tensors.values())).shape[0] if tensors else 8
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def random_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    modules: tuple[str, ...] = ALL,
    **config: Any,
) -> Path:
    """Write an adapter with random weights for a Llama folder."""
    return write_adapter(folder, low_rank_tensors(base, rank, seed, modules), **config)


def folded(base: Path, adapter: Path, out: Path) -> Path:
    """Write the model that `base` with `adapter` is, by the formula alone."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    weights = load_file(base / "model.safetensors")
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, a in halves.items():
        if ".lora_A." in name:
            target = name.removeprefix(PREFIX).replace(".lora_A", "")
            b = halves[name.replace(".lora_A", ".lora_B")]
            weights[target] = weights[target] + scale * (b @ a)
    out.mkdir(parents=True)
    (out / "config.json").write_text((base / "config.json").read_text())
    save_file(weights, out / "model.safetensors")
    return out
