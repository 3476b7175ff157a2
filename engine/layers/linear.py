"""Linear layers, with several projections of one input stacked into one matmul.

On a CPU the weight is prepacked for oneDNN after loading. In the packed matmul, a row's bits do not
depend on the number of rows. The exception is a single long row, for which oneDNN uses another
kernel. So a single row is computed as two equal rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.ops.linear import linear

PACKING_ROWS = 32  # packing hint; a good choice for any number of rows


class Linear(nn.Module):
    """y = x W^T + b with x [T, in], y [T, out].

    `parts` names slices of the output rows that come from different checkpoint tensors.
    """

    def __init__(
        self, in_features: int, out_features: int | dict[str, int], *, bias: bool = False
    ) -> None:
        super().__init__()
        sizes = out_features if isinstance(out_features, dict) else {"": out_features}
        self.parts: dict[str, slice] = {}
        rows = 0
        for name, size in sizes.items():
            self.parts[name] = slice(rows, rows + size)
            rows += size
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self._packed: PackedWeight | None = None

    def prepack(self, *, compiled: bool = False) -> None:
        """Reorder the weight for oneDNN and free the plain one. CPU only; irreversible."""
        assert self.weight is not None
        self._packed = PackedWeight(self.weight.data, self.bias, compiled=compiled)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self.bias)


class PackedWeight:
    """A weight [out, in] in oneDNN's layout, with its matmul and optional bias.

    With `compiled`, our own kernel multiplies few rows, if it supports this weight.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = False
    ) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        self._bias = bias
        self._few_rows: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._most = 0  # the largest number of rows for our own kernel
        if compiled:
            from engine.kernels.cpu.linear import few_rows

            if kernel := few_rows(weight, self._packed, bias):
                self._few_rows, self._most = kernel, kernel.most

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        count = x.shape[0]
        if self._few_rows is not None and count <= self._most:
            return self._few_rows(x)
        rows = torch.cat((x, x)) if count == 1 else x
        y = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return y[:1] if count == 1 else y
