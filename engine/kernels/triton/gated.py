"""Activations of feed-forward layers, optionally multiplied by the other half of the input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.overlap import launch_options, wait_for_inputs

BLOCK = 1024


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))  # cannot overflow
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    numerator = tl.where(x < 0, e, 1.0)
    return numerator / (1.0 + e)


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "gelu_tanh":
        half = 0.5 * x
        cube = 0.044715 * x * x * x
        return half * (1.0 + tanh(0.7978845608028654 * (x + cube)))
    else:
        tl.static_assert(KIND == "relu_squared")
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def _activation_kernel(
    x_ptr,
    out_ptr,
    stride,
    size,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    row_ptr = x_ptr + row * stride
    x = tl.load(row_ptr + columns, mask, 0.0).to(tl.float32)
    y = activated(x, KIND)
    if GATED:
        up = tl.load(row_ptr + size + columns, mask, 0.0)
        y *= up.to(tl.float32)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask)


# Inputs may be slices.
@triton.jit(
    do_not_specialize=["x_ptr", "gate_ptr", "x_stride", "x_head", "gate_stride", "gate_head"]
)
def _sigmoid_mul_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    x_head,
    gate_stride,
    gate_head,
    heads,
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + token * x_stride + head * x_head + columns, mask, 0.0)
    gate = tl.load(gate_ptr + token * gate_stride + head * gate_head + columns, mask, 0.0)
    y = x.to(tl.float32) * sigmoid(gate.to(tl.float32))
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), [T, N] or [T, H, N] each, with any strides of tokens and heads."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 2:
        x, gate = x[:, None], gate[:, None]
    tokens, heads, size = x.shape
    assert x.stride(2) == gate.stride(2) == 1
    block = min(triton.next_power_of_2(size), BLOCK)
    if tokens:
        _sigmoid_mul_kernel[tokens * heads, triton.cdiv(size, block)](
            x,
            gate,
            out,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            heads,
            size,
            block,
            **launch_options(x.device),
        )
    return out


def activate(x: torch.Tensor, kind: str, *, gated: bool) -> torch.Tensor:
    """Apply `kind` (silu, gelu_tanh or relu_squared) to x [..., F] in fp32 and round once.

    If `gated`, x is [..., 2F] with gate and up side by side. The result [..., F] is the activated
    gate times up.
    """
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    if len(rows):
        blocks = triton.cdiv(size, BLOCK)
        grid = (len(rows), blocks)
        _activation_kernel[grid](
            rows, out, rows.stride(0), size, kind, gated, BLOCK, **launch_options(x.device)
        )
    return out
