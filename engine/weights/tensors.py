"""Tensors of safetensors files as streams of bytes: read and written a chunk at a time.

Plain reads, not a mapping: the pages of a mapping stay, and count as this process's memory, until
somebody else needs them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import model_folder, read_json, safetensors_header
from engine.errors import ConfigError
from engine.weights.loader import tensor_files

CHUNK = 1 << 20  # elements
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

Declared = tuple[str, tuple[int, ...], int]  # a tensor's dtype, shape and bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # its first byte in the file
    size: int  # bytes

    def chunks(self) -> Iterator[bytearray]:
        """The bytes in order, CHUNK elements at a time."""
        width = self.size // max(math.prod(self.shape), 1)
        left = self.size
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            while left:
                buffer = bytearray(min(left, CHUNK * width))
                if stream.readinto(buffer) < len(buffer):
                    raise ConfigError(f"{self.file} became shorter while it was read.")
                left -= len(buffer)
                yield buffer

    def floats(self) -> Iterator[torch.Tensor]:
        """The values in order, flat, CHUNK at a time, in fp32, or in fp64 if they are that."""
        dtype = FLOATS[self.dtype]
        for buffer in self.chunks():
            yield torch.frombuffer(buffer, dtype=dtype).to(torch.promote_types(dtype, torch.float))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]  # file by file, in the order of their bytes

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """By the headers alone; raises ConfigError where `model` is not a sound model folder."""
        folder = model_folder(model)
        tensors = {}
        for file in dict.fromkeys(tensor_files(folder).values()):
            header = safetensors_header(file)
            spans = {name: entry["data_offsets"] for name, entry in header.items()}
            data = file.stat().st_size - max((end for _, end in spans.values()), default=0)
            for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
                dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
                tensors[name] = StoredTensor(file, dtype, shape, data + begin, end - begin)
        return cls(folder, read_json(folder / "config.json"), tensors)


def write_file(
    file: Path,
    tensors: Mapping[str, Declared],
    chunks: Iterable[memoryview],
) -> None:
    """A safetensors file of `tensors`, whose bytes, one tensor after the other, are `chunks`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the data: it begins aligned
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for chunk in chunks:
            stream.write(chunk)
    assert file.stat().st_size == 8 + len(text) + end
