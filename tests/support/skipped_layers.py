"""Copies of a checkpoint with its first layers only: a draft model that often agrees with it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

LAYER = re.compile(r"\.layers\.(\d+)\.")
WEIGHTS = "model.safetensors"


def with_first_layers(source: Path, target: Path, layers: int) -> Path:
    """Write a copy of the checkpoint `source` without the layers from number `layers` on."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(WEIGHTS))
    file = target / "config.json"
    config = json.loads(file.read_text())
    assert layers < config["num_hidden_layers"], "no layer is left out"
    file.write_text(json.dumps(config | {"num_hidden_layers": layers}))
    kept = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        layer = LAYER.search(name)
        if layer is None or int(layer[1]) < layers:
            kept[name] = tensor
    save_file(kept, target / WEIGHTS)
    return target
