"""Row norms, with the sum before them and the norm before that sum in the same launch.

A row is one program's: it is read once, held in registers, reduced in fp32 and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x, mask, size, eps, MEAN: tl.constexpr):
    """x [BLOCK] fp32, zero where masked, divided by its standard deviation or root mean square."""
    if MEAN:
        x = tl.where(mask, x - tl.sum(x) / size, 0.0)
    return x * tl.rsqrt(tl.sum(x * x) / size + eps)


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    post_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    out_ptr,
    x_stride,
    delta_stride,
    size,
    eps,
    MEAN: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + at, mask, 0.0).to(tl.float32)
        if post_ptr is not None:
            post = tl.load(post_ptr + at, mask, 0.0).to(tl.float32) + OFFSET
            delta = _scale(delta, mask, size, eps, False) * post
            delta = delta.to(out_ptr.dtype.element_ty).to(tl.float32)
        rounded = (x + delta).to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + at, rounded, mask)
        x = rounded.to(tl.float32)
    x = _scale(x, mask, size, eps, MEAN)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + at, mask, 0.0).to(tl.float32) + OFFSET
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + row * size + at, x.to(out_ptr.dtype.element_ty), mask)


def norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    mean: bool = False,
    offset: bool = False,
    post: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta and its norm, [..., N] each; without a delta, x itself.

    x and delta are dense but for the stride between the rows of [T, N]. `mean` subtracts the mean
    first, `offset` adds one to the weights, `post` [N] is the weight of an RMS norm of the delta.
    """
    size = x.shape[-1]
    rows = x.numel() // size
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(normed)
    x, delta = _rows(x), None if delta is None else _rows(delta)
    block = triton.next_power_of_2(size)
    if rows:
        _norm_kernel[(rows,)](
            x,
            delta,
            post,
            weight,
            bias,
            total,
            normed,
            x.stride(0),
            0 if delta is None else delta.stride(0),
            size,
            eps,
            MEAN=mean,
            OFFSET=int(offset),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return total, normed


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., N] as [T, N] with neighbouring elements of a row side by side."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
