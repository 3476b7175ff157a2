"""Linear layers, with several projections of one input stacked into one matmul.

On a CPU, or if it is quantised, the weight is packed once it is loaded (`weights/pack.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.weights.pack import Weight, pack
from engine.ops.codes import Quantization
from engine.ops.kernels import Kernels
from engine.ops.linear import linear


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
        self._packed: Weight | None = None
        self.kernels: Kernels = "torch"

    def prepack(self, quantization: Quantization | None = None) -> None:
        """Pack the weight and free the plain one; irreversible. See `pack`.

        `kernels` must be set before.
        """
        assert self.weight is not None
        self._packed = pack(
            self.weight.data, self.bias, kernels=self.kernels, quantization=quantization
        )
        if self._packed is not None:
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x)
        assert self.weight is not None
        return linear(x, self.weight, self.bias, kernels=self.kernels)
