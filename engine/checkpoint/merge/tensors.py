"""The checkpoints that are merged, and the safetensors files that are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import model_folder, read_json, weight_files
from engine.checkpoint.quantised.methods import quantisation_key
from engine.checkpoint.stored import StoredTensor, stored_tensors
from engine.errors import ConfigError

Declared = tuple[str, tuple[int, ...], int]  # a tensor's dtype, shape and size in bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]  # file by file, in byte order

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """Read the config and the tensor headers of a model folder, without tensor data.

        Raises ConfigError if `model` is not a valid model folder.
        """
        folder = model_folder(model)
        config = read_json(folder / "config.json")
        if key := quantisation_key(config):
            raise ConfigError(
                f"{folder} has {key} in config.json: quantised checkpoints cannot be merged. Merge "
                "the originals."
            )
        return cls(folder, config, stored_tensors(weight_files(folder)))


def write_file(
    file: Path,
    tensors: Mapping[str, Declared],
    chunks: Iterable[memoryview],
) -> None:
    """Write a safetensors file of `tensors`. `chunks` are their bytes, one tensor after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the data, which readers memory-map
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for chunk in chunks:
            stream.write(chunk)
    assert file.stat().st_size == 8 + len(text) + end
