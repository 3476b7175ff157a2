"""A plain checkpoint: safetensors files that are not quantised, as `merge` and `quantize` read."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import model_folder, read_config, weight_files
from engine.checkpoint.gguf.parts import is_gguf
from engine.checkpoint.quantized.formats import quantization_key
from engine.checkpoint.stored import StoredTensor, stored_tensors
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]  # file by file, in byte order

    @classmethod
    def open(cls, model: str, to_be: str) -> Checkpoint:
        """Read the config and the tensor headers of a model folder, without tensor data.

        `to_be` names what will be done with it, such as "merged". Raises ConfigError if `model` is
        not a valid model folder, or if it is a GGUF file or quantised.
        """
        folder = model_folder(model)
        config = read_config(folder)
        if key := quantization_key(config):
            raise ConfigError(
                f"{folder} has {key} in config.json: quantised checkpoints cannot be {to_be}. Use "
                "the original."
            )
        files = weight_files(folder)
        if is_gguf(files[0]):
            raise ConfigError(
                f"{files[0]} is a GGUF file, which cannot be {to_be}. Use the original, in "
                "safetensors."
            )
        return cls(folder, config, stored_tensors(files))

    def name_of(self, file: Path) -> str:
        """Return the name of a file of weights, as an index writes it."""
        return file.relative_to(self.folder).as_posix()


def record_of(inputs: Sequence[Checkpoint]) -> dict[str, Any]:
    """Return what identifies the inputs and versions of a command that wrote a folder."""
    versions = {name: importlib.metadata.version(name) for name in ("penstock", "torch")}
    return {
        "inputs": [
            {
                "folder": str(checkpoint.folder),
                "config_sha256": _sha256(checkpoint.folder / "config.json"),
                "bytes": {
                    checkpoint.name_of(file): file.stat().st_size
                    for file in weight_files(checkpoint.folder)
                },
            }
            for checkpoint in inputs
        ],
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
