"""Attention within spans of tokens on a CPU that multiplies bf16 (`source/span_attention.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device.openmp import in_threads, parallel
from engine.kernels.numba.call import KEY_PANEL, LOG2_E, SPAN_TASK, SpansCall
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.cpu import has_avx512_bf16
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.prepared import aligned

MOST_KEYS = 4096  # of a span: its values stay in the L2 cache of a core
SCORES = 2**14  # of a task, at most, unless fewer than MULTIPLE rows have as many
MOST_ROWS, MULTIPLE = 64, 4  # of a task
WIDTHS = (64, 32, 16)  # numbers of a value that are packed together


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `SpanPlan` can attend on this CPU, for spans of at most MOST_KEYS."""
    is_packable = dtype == torch.bfloat16 and head_dim % min(WIDTHS) == 0
    return is_packable and has_avx512_bf16() and parallel() is not None


class SpanPlan:
    """The tasks of adjacent spans of tokens, the same in all layers of `heads` heads."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        panels, tasks = [], []
        first = packed = most = 0
        for length in lengths:
            keys = -(-length // KEY_PANEL) * KEY_PANEL
            rows = max(MULTIPLE, min(MOST_ROWS, SCORES // keys // MULTIPLE * MULTIPLE))
            span = (first, length, packed)
            panels += [(*span, 0, *part) for part in _parts(length, KEY_PANEL)]
            for head in range(heads):
                tasks += [(*span, head, *part) for part in _parts(length, rows)]
            most = max(most, rows * keys)
            first += length
            packed += keys
        self._panels = np.array(panels, dtype=SPAN_TASK)
        self._tasks = np.array(tasks, dtype=SPAN_TASK)
        self._heads, self._packed, self._most_scores = heads, packed, most
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Pack keys and values [T, H, D] in bf16, each head dense, for `attend`."""
        dim = key.shape[2]
        if self._keys is None:
            room = key.new_empty(self._heads * self._packed * dim)
            self._keys, self._values = aligned(room), aligned(room)
        call = self._call(dim)
        call.num_tasks = len(self._panels)
        call.tasks = self._panels.ctypes.data
        call.key, call.key_stride = _address(key)
        call.value, call.value_stride = _address(value)
        name, *form = pack_kernel(dim)
        in_threads(kernel_store().address(str(name), *map(int, form)), call)

    def attend(self, query: torch.Tensor, rows: slice, scale: float) -> torch.Tensor:
        """Return the outputs [rows, H, D] of some rows of queries [T, H, D], see `pack`.

        A row has the same bits whichever rows are with it.
        """
        dim = query.shape[2]
        tasks = _within(self._tasks, rows)
        out = query.new_empty(rows.stop - rows.start, self._heads, dim)
        call = self._call(dim)
        call.num_tasks = len(tasks)
        call.tasks = tasks.ctypes.data
        call.query, call.query_stride = _address(query)
        call.out = out.data_ptr()
        call.out_row = rows.start
        call.scale = scale * LOG2_E
        name, *form = attend_kernel(dim)
        in_threads(kernel_store().address(str(name), *map(int, form)), call)
        return out

    def _call(self, dim: int) -> SpansCall:
        assert self._keys is not None
        assert self._values is not None
        return SpansCall(
            most_rows=MOST_ROWS,
            most_scores=self._most_scores,
            heads=self._heads,
            dim=dim,
            packed=self._packed,
            keys=self._keys.data_ptr(),
            values=self._values.data_ptr(),
        )


def pack_kernel(head_dim: int) -> Kernel:
    """Return the kernel that packs keys and values."""
    return "span_attention.pack_kernel", _width(head_dim)


def attend_kernel(head_dim: int) -> Kernel:
    """Return the kernel that attends."""
    return "span_attention.attend_kernel", _width(head_dim)


def _parts(length: int, most: int) -> list[tuple[int, int]]:
    """Cut a length in parts. Return the first number and the count of each."""
    return [(first, min(most, length - first)) for first in range(0, length, most)]


def _width(head_dim: int) -> int:
    return next(width for width in WIDTHS if head_dim % width == 0)


def _address(heads: torch.Tensor) -> tuple[int, int]:
    """Return the address of [T, H, D], and the numbers between two tokens."""
    assert heads.dtype == torch.bfloat16
    assert heads.stride(2) == 1
    assert heads.stride(1) == heads.shape[2]
    return heads.data_ptr(), heads.stride(0)


def _within(tasks: npt.NDArray[np.void], rows: slice) -> npt.NDArray[np.void]:
    """Return the tasks of these rows, cut to them."""
    begins = tasks["first_token"] + tasks["first_row"]
    ends = begins + tasks["rows"]
    cut = tasks[(begins < rows.stop) & (ends > rows.start)].copy()
    begins = cut["first_token"] + cut["first_row"]
    ends = np.minimum(begins + cut["rows"], rows.stop)
    cut["first_row"] = np.maximum(begins, rows.start) - cut["first_token"]
    cut["rows"] = ends - cut["first_token"] - cut["first_row"]
    return cut
