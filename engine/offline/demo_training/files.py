"""The files of a demo model's folder: those written by hand, and those of the training."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.offline.demo_training.trainer import Network

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"


def copy_settings(folder: Path, out: Path) -> None:
    """Copy the hand-written files of a model folder, unless OUT is that folder."""
    if out.resolve() == folder.resolve():
        return
    trained = shutil.ignore_patterns(WEIGHTS, TOKENIZER)
    shutil.copytree(folder, out, ignore=trained, dirs_exist_ok=True)


def save_weights(network: Network, file: Path) -> None:
    weights = {}
    for name, tensor in network.checkpoint().items():
        weights[name] = tensor.to("cpu", torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})
