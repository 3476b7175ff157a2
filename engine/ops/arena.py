"""Memory that recorded passes share: a tensor's bytes are used again once the tensor is gone.

A pass frees most of its tensors while it runs. A replay runs in the recorded order, so later
tensors may take the memory of earlier ones. Several passes may share an arena if one is replayed at
a time, and its result is read before the next one.
"""

from __future__ import annotations

import bisect
import weakref
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.numba.call import CACHE_LINE

CHUNK_BYTES = 4 << 20  # that are requested at least; the system gives the pages that are touched
MOST_BYTES = 128 << 20
Bytes = npt.NDArray[np.uint8]


class Span(NamedTuple):
    """The bytes [begin, end) of a chunk."""

    chunk: int
    begin: int
    end: int


class Chunk(NamedTuple):
    """Memory that never moves, as both libraries see it."""

    array: Bytes
    tensor: torch.Tensor  # [bytes] uint8
    address: int


class Arena:
    """Gives memory to tensors, in up to `most` bytes.

    A tensor is in use while it, or a view of it, exists. Each has a storage of its own over a NumPy
    array of its own. The storage holds the only reference to the array, so the array ends with the
    last tensor.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._chunks: list[Chunk] = []
        self._free: list[Span] = []  # sorted, with no two next to each other
        self._taken: dict[Span, weakref.ref[Bytes]] = {}

    @property
    def num_bytes(self) -> int:
        """All bytes that were requested. Those of tensors of the past stay."""
        return sum(chunk.array.nbytes for chunk in self._chunks)

    @property
    def taken(self) -> frozenset[Span]:
        """The memory in use."""
        return frozenset(self._taken)

    def take(self, example: torch.Tensor) -> torch.Tensor | None:
        """Return an empty tensor with the shape, strides and dtype of `example`.

        Returns None if the arena is full.
        """
        span = self._find(_room(example))
        if span is None:
            return None
        array = self._chunks[span.chunk].array[span.begin : span.end]
        self._taken[span] = weakref.ref(array, partial(self._release, span))
        numbers = torch.from_numpy(array).view(example.dtype)
        return numbers.as_strided(example.shape, example.stride())

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._chunk_of(tensor) is not None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same numbers as a tensor that does not count as a use, if they are here."""
        chunk = self._chunk_of(tensor)
        if chunk is None:
            return tensor
        begin = (tensor.data_ptr() - chunk.address) // tensor.itemsize
        return chunk.tensor.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), begin)

    def _chunk_of(self, tensor: torch.Tensor) -> Chunk | None:
        if tensor.layout != torch.strided:  # weights in oneDNN's layout, which have no address
            return None
        address = tensor.untyped_storage().data_ptr()
        for chunk in self._chunks:
            if chunk.address <= address < chunk.address + chunk.array.nbytes:
                return chunk
        return None

    def _find(self, size: int) -> Span | None:
        """Take `size` bytes from the first free span that has them."""
        span = next((each for each in self._free if each.end - each.begin >= size), None)
        if span is None:
            span = self._grow(size)
        if span is None:
            return None
        index = self._free.index(span)
        middle = span.begin + size
        rest = [span._replace(begin=middle)] if middle < span.end else []
        self._free[index : index + 1] = rest
        return span._replace(end=middle)

    def _grow(self, size: int) -> Span | None:
        """Add a chunk, and return it as a free span."""
        size = max(size, CHUNK_BYTES)
        if self.num_bytes + size > self._most:
            return None
        room = np.empty(size + CACHE_LINE, dtype=np.uint8)
        first = -room.ctypes.data % CACHE_LINE
        array = room[first : first + size]
        self._chunks.append(Chunk(array, torch.from_numpy(array), array.ctypes.data))
        span = Span(len(self._chunks) - 1, 0, size)
        self._free.append(span)
        return span

    def _release(self, span: Span, array: weakref.ref[Bytes]) -> None:
        """Free the memory of an array that has ended, and join it with its neighbours."""
        del self._taken[span]
        index = bisect.bisect(self._free, span)
        if index < len(self._free) and self._free[index][:2] == (span.chunk, span.end):
            span = span._replace(end=self._free.pop(index).end)
        if index and self._free[index - 1][::2] == (span.chunk, span.begin):
            index -= 1
            span = span._replace(begin=self._free.pop(index).begin)
        self._free.insert(index, span)


def aliases(arena: Arena, given: Any) -> Any:
    """Return arguments of an operation with an alias for each tensor."""
    if isinstance(given, torch.Tensor):
        return arena.alias(given)
    if isinstance(given, list | tuple):
        return type(given)([aliases(arena, each) for each in given])
    if isinstance(given, dict):
        return {name: aliases(arena, each) for name, each in given.items()}
    return given


def _room(example: torch.Tensor) -> int:
    """Return the bytes of a tensor, as whole cache lines."""
    numbers = 0
    if example.numel():
        steps = zip(example.shape, example.stride(), strict=True)
        numbers = 1 + sum((size - 1) * stride for size, stride in steps)
    return max(1, -(-numbers * example.itemsize // CACHE_LINE)) * CACHE_LINE
