"""Linear layers, with several projections of one input stacked into one matmul.

On a CPU the weight is prepacked for oneDNN after loading (2 to 3 times faster at few rows, see
docs/architecture.md). The packed matmul gives each row the same bits however many rows there are,
with one exception: a single row takes another kernel when it is long. It is computed as two.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.ops.linear import linear

PACKING_ROWS = 32  # the packing hint that serves every number of rows well


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
        self._packed: torch.Tensor | None = None

    def prepack(self) -> None:
        """Reorder the weight for oneDNN and let go of the plain one. CPU only; irreversible."""
        assert self.weight is not None
        self._packed = pack(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        assert self.weight is not None
        return linear(x, self.weight, self.bias)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque oneDNN tensor of `weight` [out, in]."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.shape[0] == 1:
        return torch.ops.mkldnn._linear_pointwise(torch.cat((x, x)), packed, bias, "none", [], "")[
            :1
        ]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
