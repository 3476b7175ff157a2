"""Rows of inputs, and weights, in the form that a kernel reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.kernels.numba.call import CACHE_LINE


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Tensors [rows, ...] and numbers, by the name of a field in the kernel's call."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """The value of each field for the first row, and how much it grows from row to row."""
        addresses = {
            name: (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)
            for name, tensor in self.tensors.items()
        }
        return addresses | {name: (number, 0) for name, number in self.numbers.items()}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins at a cache line. Kernels load whole lines."""
    size = tensor.numel()
    room = torch.empty(size + CACHE_LINE // tensor.itemsize, dtype=tensor.dtype)
    first = -room.data_ptr() % CACHE_LINE // tensor.itemsize
    place = room[first : first + size].view(tensor.shape)
    return place.copy_(tensor)
