"""A linear layer with its weight as checkpoints store it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.dispatch import kernels_for

FEW_ROWS = 8  # up to here reading the weight is all that takes time, and ours does only that


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T + b: x [T, in], the weight [out, in]; [T, out], in x's dtype if none is given."""
    if len(x) <= FEW_ROWS and weight.dtype.itemsize == 2 and kernels_for(x):
        from engine.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, dtype or x.dtype)
    y = F.linear(x, weight, bias)
    return y if dtype is None else y.to(dtype)
