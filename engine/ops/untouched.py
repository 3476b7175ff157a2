"""Zeros that take no memory before they are written to."""

from __future__ import annotations

import math
import mmap

import torch


def untouched_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros. On a CPU they are mapped only: a page takes memory once it is written to."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags | getattr(mmap, "MAP_NORESERVE", 0))
    except OSError as error:  # more than the address space that is left
        raise MemoryError(f"{size} bytes of cache cannot be mapped: {error}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
