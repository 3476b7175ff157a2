"""Weights in oneDNN's packed layout, for CPUs.

The packed matmul gives a row the same bits for any number of rows, with one exception: a single
long row uses another kernel. A single row is therefore computed as two equal rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.ops.kernels import Kernels

if TYPE_CHECKING:
    from engine.kernels.numba.linear import PackedMultiply

PACKING_ROWS = 32  # packing hint; a good choice for any number of rows


class PackedWeight:
    """A weight [out, in] in oneDNN's layout, with its matmul and optional bias.

    With `kernels` "numba", our own kernel multiplies if it supports this weight, in few cases only
    few rows (see `multiply_for`).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        kernels: Kernels = "torch",
    ) -> None:
        self._packed: torch.Tensor | None = None
        self._bias = bias
        self._kernel: PackedMultiply | None = None
        self.any_rows: PackedMultiply | None = None  # our own kernel, if it takes all rows
        self._max_rows = 0  # the largest number of rows for our own kernel
        self._outputs = len(weight)
        if kernels == "numba":
            from engine.kernels.numba.linear import packs_padded, padded_multiply

            outputs, inputs = weight.shape
            if packs_padded(outputs, inputs, weight.dtype, has_bias=bias is not None):
                self._kernel = padded_multiply(weight, bias)
                self._max_rows = self._kernel.most
                return
        self._pack(weight, kernels)

    def _pack(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._packed = packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        if kernels == "numba":
            from engine.kernels.numba.linear import ANY_ROWS, multiply_for

            if kernel := multiply_for(weight, packed, self._bias):
                self._kernel, self._max_rows = kernel, kernel.most
                self.any_rows = kernel if kernel.most == ANY_ROWS else None

    @property
    def nbytes(self) -> int:
        if self._packed is not None:
            return self._packed.nbytes
        assert self._kernel is not None
        return self._kernel.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        count = x.shape[0]
        if self._kernel is not None and count <= self._max_rows:
            y = self._kernel(x)
            return y if y.shape[1] == self._outputs else y[:, : self._outputs]
        rows = torch.cat((x, x)) if count == 1 else x
        y = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return y[:1] if count == 1 else y
