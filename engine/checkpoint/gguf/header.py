"""The header of a GGUF file: its settings, and where its tensors are.

The format is described at github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header may be
damaged or hostile: no length in it is believed beyond the end of the file. PyPI's `gguf` reads
past that end without an error, so it only serves the tests, as the reference.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.kinds import KINDS, SERVED, TensorKind, why_not_served
from engine.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of the tensors, unless general.alignment says otherwise
MAX_ENTRIES = 1_000_000  # settings, tensors, or values of an array
MAX_VALUES = 4_000_000  # of all arrays; the largest vocabularies have 2 million in three arrays
MAX_DEPTH = 4  # of arrays in arrays
MAX_DIMENSIONS = 4  # ggml's limit
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a text, before its bytes
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `shape` is torch's order: the last dimension is contiguous.

    `scales` are further factors of the numbers: none, one, or one for each expert.
    """

    file: Path
    kind: TensorKind
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    nbytes: int
    scales: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    settings: dict[str, Any]  # such as general.architecture
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file. Raises ConfigError if it is damaged or not supported."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return _Reader(file, m).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"{file} is not a readable GGUF file: {error}") from error


def read_floats(name: str, tensor: StoredTensor) -> list[float]:
    """Return the numbers of a small tensor. Raises ConfigError unless they are fp32."""
    count = tensor.nbytes // 4
    if tensor.kind.name != "F32" or count > MAX_ENTRIES:
        raise ConfigError(
            f"{name} in {tensor.file} has the type {tensor.kind.name}; served is F32."
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", stream.read(tensor.nbytes)))


class _Reader:
    """Reads values one after another. ValueError says what is wrong, and where."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._size = len(content)
        self._at = 0
        self._num_values = 0  # of arrays

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            kind = "big-endian" if version and not version & 0xFFFF else "unknown"
            raise ValueError(f"version {version} is {kind}; versions 2 and 3 are read")
        num_tensors, num_settings = self._count("tensors"), self._count("settings")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            name = self._text()
            if name in settings:
                raise ValueError(f"{name!r:.99} is there twice")
            settings[name] = self._value(self._number("I"), name)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.99}, not a power of two")
        begin = math.ceil(self._at / alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, number, shape, offset in found:
            if name in tensors:
                raise ValueError(f"the tensor {name!r:.99} is there twice")
            tensors[name] = self._stored(name, number, shape, begin + offset)
        return Header(settings, tensors)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        dimensions = self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name!r:.99} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, self._number("I"), shape[::-1], self._number("Q")

    def _stored(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> StoredTensor:
        if kind not in KINDS:
            raise ConfigError(
                f"The tensor {name!r:.99} in {self._file} has the type {why_not_served(kind)}. "
                f"Served are {SERVED}. Use a file of these, such as Q4_K_M or Q8_0."
            )
        found = KINDS[kind]
        count = math.prod(shape)
        if not shape or shape[-1] % found.block:
            raise ValueError(f"{name!r:.99} of shape {list(shape)} cannot be {found.name}")
        nbytes = count // found.block * found.nbytes
        if offset + nbytes > self._size:
            raise ValueError(
                f"{name!r:.99} ends at byte {offset + nbytes} of {self._size}: the file was cut off"
            )
        return StoredTensor(self._file, found, shape, offset, nbytes)

    def _value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"{name!r:.99} has the unknown type {kind}")
        if depth == MAX_DEPTH:
            raise ValueError(f"{name!r:.99} nests more than {MAX_DEPTH} arrays")
        element, count = self._number("I"), self._count(f"values in {name!r:.99}")
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise ValueError(f"its arrays have more than {MAX_VALUES} values")
        if element in SCALARS:
            letter = SCALARS[element]
            data = self._take(count * struct.calcsize(letter))
            return list(struct.unpack(f"<{count}{letter}", data))
        self._check_room(count * 8)  # each of them begins with a length
        if element == STRING:
            return self._texts(count)
        return [self._value(element, name, depth + 1) for _ in range(count)]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode(errors="replace")

    def _texts(self, count: int) -> list[str]:
        """Read texts as `_text` does, but faster: a vocabulary and its merges are 100,000 texts."""
        content, size, at = self._content, self._size, self._at
        texts: list[str] = []
        for _ in range(count):
            begin = at + LENGTH.size
            if begin > size:
                self._check_room(begin - self._at)
            end = begin + LENGTH.unpack_from(content, at)[0]
            if end > size:
                self._check_room(end - self._at)
            texts.append(content[begin:end].decode(errors="replace"))
            at = end
        self._at = at
        return texts

    def _count(self, what: str) -> int:
        count = self._number("Q")
        if count > MAX_ENTRIES:
            raise ValueError(f"it says that it has {count} {what}")
        return count

    def _number(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))
        return value

    def _take(self, count: int) -> bytes:
        self._check_room(count)
        taken = self._content[self._at : self._at + count]
        self._at += count
        return taken

    def _check_room(self, count: int) -> None:
        if self._at + count > self._size:
            raise ValueError(f"byte {self._at + count} is expected in a file of {self._size} bytes")
