"""The tensors of a checkpoint folder, under the names and in the form of a Hugging Face checkpoint.

Each one knows its file and reads itself: plain safetensors, quantised safetensors or GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.checkpoint.folder import image_encoder_file, read_config, weight_files
from engine.checkpoint.gguf.encoder_tensors import seeing_tensors
from engine.checkpoint.gguf.parts import is_gguf
from engine.checkpoint.gguf.tensors import GGUFTensor, StackedTensor, read_tensors
from engine.checkpoint.quantized.formats import storage_format
from engine.checkpoint.quantized.tensors import QuantizedTensor, original_tensors
from engine.checkpoint.stored import StoredTensor, stored_tensors

CheckpointTensor = StoredTensor | QuantizedTensor | GGUFTensor | StackedTensor


def checkpoint_tensors(folder: Path) -> Mapping[str, CheckpointTensor]:
    """Return the tensors by name, without their numbers.

    Raises ConfigError if a file is damaged, a tensor is in two files, or the tensors of a quantised
    layer do not fit each other or config.json.
    """
    files = weight_files(folder)
    if is_gguf(files[0]):
        encoder = image_encoder_file(folder)
        return read_tensors(files) if encoder is None else seeing_tensors(files[:-1], encoder)
    stored = stored_tensors(files)
    storage = storage_format(read_config(folder))
    return stored if storage is None else original_tensors(stored, storage)
