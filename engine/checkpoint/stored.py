"""Tensors as they are stored in safetensors files: where their bytes are, and their numbers.

Files are read, not memory-mapped: the pages of a mapping count as memory of this process until
another process needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.folder import safetensors_header
from engine.errors import ConfigError

CHUNK = 1 << 20  # elements
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPES = {
    **FLOATS,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, without its numbers."""

    name: str
    file: Path
    dtype: str  # safetensors' name, such as BF16
    shape: tuple[int, ...]
    begin: int  # offset of its first byte in the file
    size: int  # bytes

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Return the tensor, or some of its rows, in its own dtype.

        Raises ConfigError if torch has no such dtype.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"{self.name} in {self.file} has dtype {self.dtype}, which is unknown."
            )
        begin, size, shape = self.begin, self.size, self.shape
        if rows is not None:
            row = size // max(shape[0], 1)
            begin, size = begin + rows.start * row, (rows.stop - rows.start) * row
            shape = (rows.stop - rows.start, *shape[1:])
        raw = torch.empty(size, dtype=torch.uint8)
        try:
            with self.file.open("rb") as stream:
                stream.seek(begin)
                count = stream.readinto(raw.numpy().data)
        except OSError as error:
            raise ConfigError(f"Cannot read {self.file}: {error}") from error
        if count != size:
            raise ConfigError(f"{self.file} became shorter while it was being read.")
        return raw.view(DTYPES[self.dtype]).reshape(shape)

    @property
    def width(self) -> int:
        """The bytes of an element."""
        return self.size // max(math.prod(self.shape), 1)

    def chunks(self, elements: int | None = None) -> Iterator[bytearray]:
        """Yield the bytes in order, `elements` (default: CHUNK) at a time."""
        left, most = self.size, (elements or CHUNK) * self.width
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            while left:
                buffer = bytearray(min(left, most))
                if stream.readinto(buffer) < len(buffer):
                    raise ConfigError(f"{self.file} became shorter while it was being read.")
                left -= len(buffer)
                yield buffer

    def floats(self, elements: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the values in order, `elements` at a time, as flat tensors in fp32 (fp64 stays)."""
        dtype = FLOATS[self.dtype]
        for buffer in self.chunks(elements):
            yield torch.frombuffer(buffer, dtype=dtype).to(torch.promote_types(dtype, torch.float))

    def rows(self, multiple: int) -> Iterator[torch.Tensor]:
        """Yield a matrix of floats as `floats` does, some rows [n, columns] at a time.

        Each n except the last is a multiple of `multiple`.
        """
        columns = self.shape[1]
        count = max(CHUNK // columns // multiple, 1) * multiple
        for values in self.floats(count * columns):
            yield values.view(-1, columns)


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by name: file by file, in byte order.

    Raises ConfigError if a file is damaged or a tensor is in two files.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _tensors_in(file):
            if tensor.name in found:
                raise ConfigError(
                    f"{tensor.name} is in both {found[tensor.name].file} and {file}; remove one."
                )
            found[tensor.name] = tensor
    return found


def _tensors_in(file: Path) -> list[StoredTensor]:
    header = safetensors_header(file)  # describes a truncated file better than the library
    try:
        with safe_open(file, framework="pt") as shard:  # checks that the header is consistent
            names = list(shard.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a readable safetensors file: {error}") from error
    spans = {name: tuple(header[name]["data_offsets"]) for name in names}
    data = file.stat().st_size - max((end for _, end in spans.values()), default=0)
    return [
        StoredTensor(
            name,
            file,
            header[name]["dtype"],
            tuple(header[name]["shape"]),
            data + begin,
            end - begin,
        )
        for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1])
    ]
