"""Shared by the tests of merging: tiny models, recipes, and the message of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.folder import weight_files
from engine.errors import ConfigError
from engine.offline.merge.merge import merge
from engine.offline.merge.recipe import parse

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Make = Callable[..., str]


def random(seed: int, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes or {"a.weight": (7, 5), "b.bias": (3,), "c.weight": (2, 3, 4)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def run(out: Path, **document: Any) -> Tensors:
    """Merge and return the resulting tensors."""
    merge(parse(document), out, lambda share: None)
    return {k: v for file in weight_files(out) for k, v in load_file(file).items()}


def slerp(models: list[str], t: float) -> dict[str, Any]:
    return {
        "merge_method": "slerp",
        "base_model": models[0],
        "models": [{"model": model} for model in models],
        "parameters": {"t": t},
    }


def linear(models: list[str], *weights: float, **parameters: Any) -> dict[str, Any]:
    weights = weights or (1.0,) * len(models)
    pairs = zip(models, weights, strict=True)
    sources = [{"model": model, "parameters": {"weight": weight}} for model, weight in pairs]
    return {"merge_method": "linear", "models": sources, "parameters": parameters}


def refusal(out: Path, document: dict[str, Any]) -> str:
    """Return the error message of a merge that must fail; check that it leaves no files."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        run(out, **document)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)
