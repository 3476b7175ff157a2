"""GGUF files with one tensor in another shape or type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from engine.checkpoint.gguf.header import read_header
from tests.support.tiny_gguf import add_setting

FLOATS = ("F16", "BF16", "Q8_0")
OTHERS = {"F64": np.float64, "I32": np.int32, "I8": np.int8}


class Change(NamedTuple):
    """A tensor as it is stored instead. `same` are the numbers of a file that must read the same.

    Without `same`, the file must be refused.
    """

    name: str
    stored: np.ndarray
    kind: str
    same: np.ndarray | None


class GGUFFile:
    """The settings and tensors of a file of plain tensors, to write changed ones."""

    def __init__(self, file: Path) -> None:
        self.settings = read_header(file).settings
        self.tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}

    def write(self, path: Path, name: str, numbers: np.ndarray, kind: str = "F32") -> Path:
        """Write the file with other `numbers` for the tensor `name`."""
        writer = gguf.GGUFWriter(path, self.settings["general.architecture"])
        for key, value in self.settings.items():
            if key != "general.architecture":
                add_setting(writer, key, value)
        for each, plain in self.tensors.items():
            if each != name:
                writer.add_tensor(each, plain)
            elif kind in ("F32", *OTHERS):
                writer.add_tensor(name, np.ascontiguousarray(numbers))
            else:
                number = gguf.GGMLQuantizationType[kind]
                packed = gguf.quants.quantize(np.ascontiguousarray(numbers), number)
                writer.add_tensor(name, packed, raw_dtype=number)
        for step in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{step}_to_file")()
        writer.close()
        return path

    def changes(self) -> Iterator[tuple[str, Change]]:
        """Yield changes of each kind of tensor, of one block, with what has been done."""
        parts = {".".join(name.split(".")[2:]) or name: name for name in self.tensors}
        for name in parts.values():
            plain = self.tensors[name]
            for done, numbers in _shapes(plain):
                ones = [size for size in numbers.shape if size != 1]
                is_same = ones == [size for size in plain.shape if size != 1]
                yield done, Change(name, numbers, "F32", plain if is_same else None)
            for kind in FLOATS:
                if kind != "Q8_0" or plain.shape[-1] % 32 == 0:
                    number = gguf.GGMLQuantizationType[kind]
                    packed = gguf.quants.quantize(plain.clip(-6e4, 6e4), number)
                    rounded = gguf.quants.dequantize(packed, number).reshape(plain.shape)
                    yield kind, Change(name, rounded, kind, rounded)
            for kind, dtype in OTHERS.items():
                yield kind, Change(name, plain.clip(-99, 99).astype(dtype), kind, None)


def _shapes(plain: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the numbers in other shapes, or some of them."""
    if plain.ndim > 1 and plain.shape != plain.shape[::-1]:
        yield "transposed", plain.T
    if plain.ndim > 1:
        yield "flattened", plain.reshape(-1)
        yield "one more between", plain[:, None]
    yield "one more in front", plain[None]
    if plain.ndim < 4:
        yield "one more at the end", plain[..., None]
    if 1 in plain.shape and plain.ndim > 1:
        yield "squeezed", plain.squeeze()
    yield "without a row", plain[:-1] if len(plain) > 1 else np.concatenate([plain, plain])
    if plain.ndim > 1:
        yield "without a column", plain[..., :-1]
    if plain.size % 2 == 0:
        yield "in two rows", plain.reshape(2, -1) if plain.shape[0] != 2 else plain.reshape(-1, 2)
