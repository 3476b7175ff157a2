"""Folders of sentence-transformers around a checkpoint: modules.json and what it names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Dense:
    """A linear layer with random weights."""

    inputs: int
    outputs: int
    activation: str = "Tanh"
    bias: bool = True


def sentence_folder(
    checkpoint: Path, folder: Path, pooling: Mapping[str, Any], *behind: str | Dense
) -> Path:
    """Copy a checkpoint and write its 1_Pooling/config.json and the modules `behind` it."""
    shutil.copytree(checkpoint, folder)
    modules: list[tuple[str, dict[str, Any]]] = [("Transformer", {}), ("Pooling", dict(pooling))]
    for module in behind:
        if isinstance(module, str):
            modules.append((module, {}))
            continue
        config = {
            "in_features": module.inputs,
            "out_features": module.outputs,
            "bias": module.bias,
            "activation_function": f"torch.nn.{module.activation}",
        }
        modules.append(("Dense", config))
    listed = []
    for number, (kind, config) in enumerate(modules):
        name = f"{number}_{kind}" if number else ""
        listed.append(
            {
                "idx": number,
                "name": str(number),
                "path": name,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        if number:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            _write_weights(folder / name / "model.safetensors", config, number)
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def _write_weights(path: Path, config: Mapping[str, Any], seed: int) -> None:
    import torch  # only here: most tests of servers need no torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = config["in_features"], config["out_features"]
    weights = {"linear.weight": torch.randn(outputs, inputs, generator=generator) * inputs**-0.5}
    if config["bias"]:
        weights["linear.bias"] = torch.randn(outputs, generator=generator) / 2
    save_file(weights, path)
