"""A model that differs a little from another one: its weights with noise."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noisy_copy(model: Path, folder: Path, noise: float = 0.02, seed: int = 0) -> Path:
    """Write `model` into `folder` with noise of this share of each matrix's deviation."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    generator = torch.Generator().manual_seed(seed)
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2:
                drawn = torch.randn(weight.shape, generator=generator)
                weights[name] = (weight.float() + noise * weight.float().std() * drawn).to(
                    weight.dtype
                )
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder
