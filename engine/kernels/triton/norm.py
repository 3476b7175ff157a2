"""RMS and layer norm, fused with the residual addition before them and a norm of the added tensor.

Each program computes one row. It reads the row once, keeps it in registers, reduces it in fp32 and
writes it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.gated import sigmoid
from engine.kernels.triton.overlap import launch_options, wait_for_inputs


@triton.jit
def scale_by_rms(x, mask, size, eps, MEAN: tl.constexpr):
    """Divide x [BLOCK] fp32 by its root mean square; with MEAN, center it first.

    Masked elements of x must be zero.
    """
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
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + at, mask, 0.0).to(tl.float32)
        if post_ptr is not None:
            post = tl.load(post_ptr + at, mask, 0.0).to(tl.float32) + OFFSET
            delta = scale_by_rms(delta, mask, size, eps, False) * post
            delta = delta.to(out_ptr.dtype.element_ty).to(tl.float32)
        rounded = (x + delta).to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + at, rounded, mask)
        x = rounded.to(tl.float32)
    x = scale_by_rms(x, mask, size, eps, MEAN)
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
    """Return (x + delta, its norm), [..., N] each; without a delta, (x, its norm).

    The rows [N] of x and delta may have any stride between them, but are otherwise dense. `mean`
    subtracts the mean first (layer norm). `post` [N] is the weight of an RMS norm that delta passes
    before it is added. `offset` adds one to `weight` and `post`.
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
            **launch_options(x.device),
        )
    return total, normed


# Inputs may be slices.
@triton.jit(
    do_not_specialize=["x_ptr", "gate_ptr", "x_stride", "x_head", "gate_stride", "gate_head"]
)
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    x_head,
    gate_stride,
    gate_head,
    weight_head,
    heads,
    size,
    eps,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + token * x_stride + head * x_head + at, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + head * gate_head + at, mask, 0.0)
    gate = gate.to(tl.float32)
    factor = gate * sigmoid(gate)
    if GATE_FIRST:
        x *= factor
    x = scale_by_rms(x, mask, size, eps, False)
    x *= tl.load(weight_ptr + head * weight_head + at, mask, 0.0).to(tl.float32)
    if not GATE_FIRST:
        x *= factor
    tl.store(out_ptr + row * size + at, x.to(out_ptr.dtype.element_ty), mask)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gate_first: bool
) -> torch.Tensor:
    """Compute what ops.norm.gated_rms_norm does, for [T, N] or [T, H, N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 2:
        x, gate = x[:, None], gate[:, None]
    tokens, heads, size = x.shape
    assert x.stride(2) == gate.stride(2) == 1
    assert weight.is_contiguous()
    block = triton.next_power_of_2(size)
    if tokens:
        _gated_norm_kernel[(tokens * heads,)](
            x,
            gate,
            weight,
            out,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            size if weight.dim() == 2 else 0,
            heads,
            size,
            eps,
            GATE_FIRST=gate_first,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(x.device),
        )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., N] to [T, N] with contiguous rows; copy only if necessary."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
