"""Norms, activations and rotations on a CPU, which read and write each token's values once.

torch would create a tensor for every operation in them. All of them compute in fp32. A row's result
does not depend on the other rows.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numba import carray, njit
from numba.core.ccallback import CFunc

from engine.device.openmp import in_threads
from engine.kernels.numba.call import LOG2_E, RowsCall, signature
from engine.kernels.numba.compile import EXACT, compiled
from engine.kernels.numba.exp2 import exp2
from engine.kernels.numba.intrinsics import at, take, to_element, to_fp32

SIGNATURE = signature(RowsCall)
# Allows vectorized sums over a row. Their order is not sequential, but it is the same in every row.
SUMMING = EXACT | {"reassoc"}
PART = 2**14  # elements that are worth a thread
NORM, SILU, GELU_TANH, ROTATION = range(4)  # the operations on a row
GELU_FACTOR = math.sqrt(2 / math.pi)
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


# ---- entry points ----------------------------------------------------------------------------


def norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + delta, its RMS norm), [..., N] each; without a delta, (x, its RMS norm).

    `offset` adds one to the weights. The rows of x and delta are contiguous, with any stride
    between rows.
    """
    assert weight is None or weight.dtype == x.dtype
    rows = _flat(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    if delta is None:
        total = x
        other_address = 0
        other_stride = 0
    else:
        total = torch.empty(x.shape, dtype=x.dtype)
        other = _flat(delta)
        other_address = other.data_ptr()
        other_stride = other.stride(0)
    weight_address = 0 if weight is None else weight.data_ptr()
    call = RowsCall(
        rows=len(rows),
        size=x.shape[-1],
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        other=other_address,
        other_stride=other_stride,
        sum=total.data_ptr(),
        weight=weight_address,
        out=out.data_ptr(),
        eps=eps,
        offset=float(offset),
    )
    _run(NORM, x.dtype, call)
    return total, out


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `kind`(gate) * up, [..., N], where each row [..., 2 * N] is gate and then up.

    `kind` is silu or gelu_tanh.
    """
    size = gate_up.shape[-1] // 2
    rows = _flat(gate_up)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
    call = RowsCall(
        rows=len(rows),
        size=size,
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        out=out.data_ptr(),
    )
    _run(ACTIVATIONS[kind], gate_up.dtype, call)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] by cos and sin [T, 1, D], as ops.rotary.apply_rotary does.

    x is copied unless the heads of a token are contiguous.
    """
    if not x[0].is_contiguous():
        x = x.contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert cos.dtype == sin.dtype == x.dtype
    out = torch.empty(x.shape, dtype=x.dtype)
    call = RowsCall(
        rows=len(out),
        size=out[0].numel(),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        out=out.data_ptr(),
        dim=x.shape[2],
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
    )
    _run(ROTATION, x.dtype, call)
    return out


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Reshape to [rows, N]; no copy if there is a single stride between rows."""
    assert x.stride(-1) == 1
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def _run(operation: int, dtype: torch.dtype, call: RowsCall) -> None:
    kernel = rows_kernel(operation, dtype == torch.bfloat16)
    elements = call.rows * call.size
    call.at_once = max(1, PART // (4 * call.size))
    in_threads(kernel, call, alone=elements < 2 * PART)


# ---- the operations on a row -----------------------------------------------------------------


@njit(inline="always")
def row_of(address, row, stride, size, kind, item):
    """Return a row of the array at this address; an element has `item` bytes."""
    begin = address + item * stride * row
    return carray(at(begin), (size,), kind)


@njit(inline="always")
def norm_row(call, row, kind, item):
    size = call.size
    x = row_of(call.x, row, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    if call.other:
        other = row_of(call.other, row, call.other_stride, size, kind, item)
        total = row_of(call.sum, row, size, size, kind, item)
        squares = add(x, other, total)
    else:
        total = x
        squares = square(x)
    mean = squares / np.float32(size)
    root = np.sqrt(mean + np.float32(call.eps))
    factor = np.float32(1) / root
    if call.weight:
        weight = row_of(call.weight, 0, 0, size, kind, item)
        scale(total, factor, weight, np.float32(call.offset), out)
    else:
        scale_alone(total, factor, out)


@njit(inline="always")
def activate_row(call, row, operation, kind, item):
    size = call.size
    gate_up = row_of(call.x, row, call.x_stride, 2 * size, kind, item)
    gate = gate_up[:size]
    up = gate_up[size:]
    out = row_of(call.out, row, size, size, kind, item)
    if operation == SILU:
        silu_mul(gate, up, out)
    else:
        gelu_tanh_mul(gate, up, out)


@njit(inline="always")
def rotate_row(call, row, kind, item):
    size = call.size
    dim = call.dim
    x = row_of(call.x, row, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    cos = row_of(call.cos, row, dim, dim, kind, item)
    sin = row_of(call.sin, row, dim, dim, kind, item)
    for begin in range(0, size, dim):
        end = begin + dim
        rotate_head(x[begin:end], cos, sin, out[begin:end])


# ---- loops over elements ---------------------------------------------------------------------


@njit(fastmath=SUMMING, error_model="numpy")
def add(x, other, total):
    """Store x + other in `total`, rounded to its type, and return the sum of its squares."""
    squares = np.float32(0)
    for i in range(len(total)):
        number = to_fp32(x[i]) + to_fp32(other[i])
        total[i] = to_element(number, total)
        rounded = to_fp32(total[i])
        squares += rounded * rounded
    return squares


@njit(fastmath=SUMMING, error_model="numpy")
def square(x):
    """Return the sum of the squares of x."""
    squares = np.float32(0)
    for i in range(len(x)):
        number = to_fp32(x[i])
        squares += number * number
    return squares


@njit(fastmath=EXACT, error_model="numpy")
def scale(x, factor, weight, offset, out):
    """Store x * factor * (weight + offset) in `out`."""
    for i in range(len(out)):
        scaled = to_fp32(x[i]) * factor
        shifted = to_fp32(weight[i]) + offset
        out[i] = to_element(scaled * shifted, out)


@njit(fastmath=EXACT, error_model="numpy")
def scale_alone(x, factor, out):
    """Store x * factor in `out`."""
    for i in range(len(out)):
        scaled = to_fp32(x[i]) * factor
        out[i] = to_element(scaled, out)


@njit(fastmath=EXACT, error_model="numpy")
def silu_mul(gate, up, out):
    for i in range(len(out)):
        x = to_fp32(gate[i])
        exponent = np.float32(-LOG2_E) * abs(x)
        e = exp2(exponent)
        numerator = np.float32(1) if x > 0 else e
        sigmoid = numerator / (np.float32(1) + e)
        activated = x * sigmoid
        out[i] = to_element(activated * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def gelu_tanh_mul(gate, up, out):
    """Compute gelu by a sigmoid: (1 + tanh(y)) / 2 = sigmoid(2 * y)."""
    for i in range(len(out)):
        x = to_fp32(gate[i])
        cube = np.float32(0.044715) * x * x * x
        y = np.float32(GELU_FACTOR) * (x + cube)
        exponent = np.float32(-2 * LOG2_E) * abs(y)
        e = exp2(exponent)
        numerator = np.float32(1) if y > 0 else e
        sigmoid = numerator / (np.float32(1) + e)
        activated = x * sigmoid
        out[i] = to_element(activated * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def rotate_head(x, cos, sin, out):
    half = len(x) // 2
    for i in range(half):
        j = half + i
        first = to_fp32(x[i])
        second = to_fp32(x[j])
        turned = first * to_fp32(cos[i]) + second * to_fp32(sin[i])
        out[i] = to_element(turned, out)
        turned = second * to_fp32(cos[j]) + first * to_fp32(sin[j])
        out[j] = to_element(turned, out)


# ---- the kernel ------------------------------------------------------------------------------


@cache
def rows_kernel(operation: int, half: bool) -> CFunc:
    """Return the kernel that applies `operation` to rows it takes off the counter.

    `operation` is a number and not a function, because Numba compiles code that closes over a
    function again in every process.
    """
    kind = np.uint16 if half else np.float32
    item = 2 if half else 4

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            end = min(first + call.at_once, call.rows)
            for row in range(first, end):
                if operation == NORM:
                    norm_row(call, row, kind, item)
                elif operation == ROTATION:
                    rotate_row(call, row, kind, item)
                else:
                    activate_row(call, row, operation, kind, item)

    return compiled(over_rows, SIGNATURE, operation, half)
