"""Linear layer with the weight in the layout of checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.folded import max_folded_rows
from engine.ops.kernels import Kernels

FEW_ROWS = 16  # up to this count, reading the weight takes all the time, and our kernel is faster
WIDENED = 2048  # outputs of a 16-bit weight that are widened at a time, on a CPU


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return x W^T + b [T, out], for x [T, in] and a weight [out, in]. `dtype` defaults to x's.

    The result is `out` if it is given: a dense tensor of that shape and dtype.

    Sums of 16-bit products are rounded once, to `dtype`. On a CPU, where torch has no such product,
    the weight is widened to fp32 first.
    """
    halves = weight.dtype.itemsize == 2
    if kernels == "triton" and halves:
        if len(x) <= max_folded_rows(x.device):
            from engine.kernels.triton.folded_linear import folded_linear

            return folded_linear(x, weight, bias, dtype or x.dtype, out=out).out
        if len(x) <= FEW_ROWS:
            from engine.kernels.triton.linear import few_rows_linear

            return few_rows_linear(x, weight, bias, dtype or x.dtype, out=out)
    if dtype == torch.float32 and halves and bias is None:
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=dtype, out=out)
        y = _widened(x, weight)
        return y if out is None else out.copy_(y)
    if out is not None and bias is None and out.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    y = F.linear(x, weight, bias)
    if out is not None:
        return out.copy_(y)
    return y if dtype is None else y.to(dtype)


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T in fp32 for 16-bit numbers."""
    rows = x.float()
    return torch.cat([_fp32_linear(rows, part.float()) for part in weight.split(WIDENED)], dim=1)


def _fp32_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T, by oneDNN if torch has it: MKL takes several times longer for these shapes."""
    if torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)
