"""Linear layers for few rows on a CPU that multiplies bf16 (AVX512_BF16).

Reading the weight takes most of the time, and oneDNN reads it below the memory bandwidth. This
kernel reads oneDNN's own packed bytes, so there is no second copy of the weight. It sums in
oneDNN's order, so that a row has the same bits in small and large batches.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from numba import carray, njit
from numba.core.ccallback import CFunc

from engine.device.facts import uses_amx
from engine.device.openmp import in_threads, parallel
from engine.kernels.numba.call import LinearCall, signature
from engine.kernels.numba.compile import compiled
from engine.kernels.numba.intrinsics import AVX512_BF16, CACHE_LINE, multiply_panel, take

SIGNATURE = signature(LinearCall)
# Up to this many rows, reading the weight dominates. With AMX, oneDNN catches up at fewer rows.
FEW_ROWS, FEW_ROWS_AMX = 8, 4
WIDTHS = (64, 32, 16)  # outputs per panel that oneDNN is known to use
SPLITS = (256, 512, 2**30)  # pairs of inputs per partial sum that oneDNN is known to use
SHARES = 4  # a thread takes its panels in about this number of parts
PROBES = 128  # rows whose results are compared with oneDNN's


class FewRows:
    """y = x W^T + b for up to `most` rows of x, W packed by oneDNN in panels of `width`."""

    def __init__(
        self, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None, width: int, split: int
    ) -> None:
        self._packed, self._bias = packed, bias  # the call holds only their addresses
        self._outputs = outputs
        self.most = FEW_ROWS_AMX if uses_amx(packed.device, packed.dtype) else FEW_ROWS
        self._kernel = few_rows_kernel(width, bias is not None)
        panels = outputs // width
        self._call = LinearCall(
            panels=panels,
            at_once=max(1, panels // (SHARES * torch.get_num_threads())),
            weight=torch.ops.mkldnn.data_ptr(packed),
            bias=0 if bias is None else bias.data_ptr(),
            pairs=packed.shape[1] // 2,
            split=split,
            out_bytes=2 * outputs,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, outputs] for x [rows, inputs]."""
        rows, call = x.shape[0], self._call
        assert rows <= self.most
        assert x.stride(1) == 1
        out = torch.empty(rows, self._outputs, dtype=torch.bfloat16)
        call.x, call.x_bytes, call.rows = x.data_ptr(), 2 * x.stride(0), rows
        call.out = out.data_ptr()
        in_threads(self._kernel, call)
        return out


def few_rows(
    weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> FewRows | None:
    """Return a FewRows for `packed`, which is `weight` [out, in] packed by oneDNN.

    Returns None if no kernel gives oneDNN's results bit by bit. With AMX they only have to be
    close, because oneDNN's own bits depend on the number of rows (see docs/cpu.md).
    """
    bf16 = weight.dtype == torch.bfloat16 and AVX512_BF16
    if not bf16 or parallel() is None or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    aligned = torch.ops.mkldnn.data_ptr(packed) % CACHE_LINE == 0
    if torch.ops.mkldnn._nbytes(packed) != weight.nbytes or not aligned:
        return None
    if (width := _width(weight, packed)) is None:
        return None
    shape = (*weight.shape, width, bias is not None)
    if shape not in _splits:
        _splits[shape] = next((s for s in SPLITS if _agrees(packed, weight, bias, width, s)), None)
    split = _splits[shape]
    return None if split is None else FewRows(packed, len(weight), bias, width, split)


_splits: dict[tuple[int, int, int, bool], int | None] = {}  # one for all layers of the same shape


def _width(weight: torch.Tensor, packed: torch.Tensor) -> int | None:
    """Return the outputs per panel, or None unless exactly one known width explains the bytes.

    A panel stores the first pair of inputs for all its outputs, then the second pair, and so on.
    """
    if weight.shape[1] % 2 or len(weight) % (most := max(WIDTHS)):
        return None
    begin = (ctypes.c_int16 * weight[:most].numel()).from_address(torch.ops.mkldnn.data_ptr(packed))
    found, bits = torch.frombuffer(begin, dtype=torch.int16), weight[:most].view(torch.int16)
    panels = {w: bits.view(most // w, w, -1, 2).transpose(1, 2).flatten() for w in WIDTHS}
    widths = [width for width, expected in panels.items() if torch.equal(found, expected)]
    return widths[0] if len(widths) == 1 else None


def _agrees(
    packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int, split: int
) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, weight.shape[1], generator=generator).to(weight.dtype)
    right = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    ours = FewRows(packed, len(weight), bias, width, split)
    found = torch.cat([ours(some) for some in x.split(ours.most)])
    if uses_amx(weight.device, weight.dtype):
        return torch.allclose(found, right, rtol=2**-6, atol=2**-6 * right.abs().max().item())
    return torch.equal(found, right)


@njit(inline="always")
def multiply_rows(call, panel, row, rows, width, biased):
    weight = call.weight + 4 * width * call.pairs * panel
    bias = call.bias + 2 * width * panel
    x = call.x + call.x_bytes * row
    out = call.out + call.out_bytes * row + 2 * width * panel
    multiply_panel(
        weight,
        bias,
        call.pairs,
        call.split,
        x,
        call.x_bytes,
        out,
        call.out_bytes,
        rows,
        width,
        biased,
    )


@cache
def few_rows_kernel(width: int, biased: bool) -> CFunc:
    """Return a kernel that multiplies as many rows at a time as registers can hold sums for."""
    together = 256 // width

    def multiply(pointer):
        call = carray(pointer, 1)[0]
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.panels:
                return
            for panel in range(first, min(first + call.at_once, call.panels)):
                row = 0
                while row < call.rows:
                    left = call.rows - row
                    if together >= 8 and left >= 8:
                        multiply_rows(call, panel, row, 8, width, biased)
                        row += 8
                    elif left >= 4:
                        multiply_rows(call, panel, row, 4, width, biased)
                        row += 4
                    elif left == 3:
                        multiply_rows(call, panel, row, 3, width, biased)
                        row += 3
                    elif left == 2:
                        multiply_rows(call, panel, row, 2, width, biased)
                        row += 2
                    else:
                        multiply_rows(call, panel, row, 1, width, biased)
                        row += 1

    return compiled(multiply, SIGNATURE, width, biased)
