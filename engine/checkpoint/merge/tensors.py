"""Read and write tensors of safetensors files as streams of bytes, one chunk at a time.

Files are read, not memory-mapped: the pages of a mapping count as memory of this process until
another process needs them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.folder import model_folder, read_json, safetensors_header
from engine.checkpoint.loader import tensor_files
from engine.errors import ConfigError

CHUNK = 1 << 20  # elements
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

Declared = tuple[str, tuple[int, ...], int]  # a tensor's dtype, shape and size in bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]
    begin: int  # offset of its first byte in the file
    size: int  # bytes

    def chunks(self) -> Iterator[bytearray]:
        """Yield the bytes in order, CHUNK elements at a time."""
        width = self.size // max(math.prod(self.shape), 1)
        left = self.size
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            while left:
                buffer = bytearray(min(left, CHUNK * width))
                if stream.readinto(buffer) < len(buffer):
                    raise ConfigError(f"{self.file} became shorter while it was being read.")
                left -= len(buffer)
                yield buffer

    def floats(self) -> Iterator[torch.Tensor]:
        """Yield the values in order as flat tensors of CHUNK elements, in fp32 (fp64 stays)."""
        dtype = FLOATS[self.dtype]
        for buffer in self.chunks():
            yield torch.frombuffer(buffer, dtype=dtype).to(torch.promote_types(dtype, torch.float))


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
