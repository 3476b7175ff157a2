"""Linear layer with the weight in the layout of checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.kernels import Kernels

FEW_ROWS = 16  # up to this count, reading the weight takes all the time, and our kernel is faster


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return x W^T + b [T, out], for x [T, in] and a weight [out, in]. `dtype` defaults to x's.

    On CUDA, sums of 16-bit products are rounded once, to `dtype`.
    """
    halves = weight.dtype.itemsize == 2
    if kernels == "triton" and len(x) <= FEW_ROWS and halves:
        from engine.kernels.triton.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, dtype or x.dtype)
    if dtype == torch.float32 and halves and bias is None and x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    y = F.linear(x, weight, bias)
    return y if dtype is None else y.to(dtype)
