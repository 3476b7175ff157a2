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
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x if delta is None else torch.empty(x.shape, dtype=x.dtype)
    assert weight is None or weight.dtype == x.dtype
    flat, other = _flat(x), None if delta is None else _flat(delta)
    call = RowsCall(
        rows=len(flat),
        size=size,
        x=flat.data_ptr(),
        x_stride=flat.stride(0),
        other=0 if other is None else other.data_ptr(),
        other_stride=0 if other is None else other.stride(0),
        sum=total.data_ptr(),
        weight=0 if weight is None else weight.data_ptr(),
        out=out.data_ptr(),
        eps=eps,
        offset=float(offset),
    )
    _run(rows_kernel(NORM, x.dtype == torch.bfloat16), call)
    return total, out


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `kind`(gate) * up, [..., N], where each row [..., 2 * N] is gate and then up.

    `kind` is silu or gelu_tanh.
    """
    flat = _flat(gate_up)
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
    call = RowsCall(
        rows=len(flat),
        size=out.shape[-1],
        x=flat.data_ptr(),
        x_stride=flat.stride(0),
        out=out.data_ptr(),
    )
    _run(rows_kernel(ACTIVATIONS[kind], gate_up.dtype == torch.bfloat16), call)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] by cos and sin [T, 1, D], as ops.rotary.apply_rotary does.

    x is copied unless the heads of a token are contiguous.
    """
    x = x if x[0].is_contiguous() else x.contiguous()
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
    _run(rows_kernel(ROTATION, x.dtype == torch.bfloat16), call)
    return out


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Reshape to [rows, N]; no copy if there is a single stride between rows."""
    assert x.stride(-1) == 1
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _run(kernel: CFunc, call: RowsCall) -> None:
    call.at_once = max(1, PART // (4 * call.size))
    in_threads(kernel, call, alone=call.rows * call.size < 2 * PART)


# ---- the kernels -----------------------------------------------------------------------------


@njit(inline="always")
def row_of(address, row, stride, size, kind, item):
    return carray(at(address + item * stride * row), (size,), kind)


@njit(fastmath=SUMMING, error_model="numpy")
def add(x, other, total):
    """Store x + other in `total`, rounded to its type, and return the sum of its squares."""
    squares = np.float32(0)
    for i in range(len(total)):
        total[i] = to_element(to_fp32(x[i]) + to_fp32(other[i]), total)
        squares += to_fp32(total[i]) * to_fp32(total[i])
    return squares


@njit(fastmath=SUMMING, error_model="numpy")
def square(x):
    squares = np.float32(0)
    for i in range(len(x)):
        squares += to_fp32(x[i]) * to_fp32(x[i])
    return squares


@njit(fastmath=EXACT, error_model="numpy")
def scale(x, by, weight, offset, out):
    for i in range(len(out)):
        out[i] = to_element(to_fp32(x[i]) * by * (to_fp32(weight[i]) + offset), out)


@njit(fastmath=EXACT, error_model="numpy")
def scale_alone(x, by, out):
    for i in range(len(out)):
        out[i] = to_element(to_fp32(x[i]) * by, out)


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
        total, squares = x, square(x)
    by = np.float32(1) / np.sqrt(squares / np.float32(size) + np.float32(call.eps))
    if call.weight:
        scale(total, by, row_of(call.weight, 0, 0, size, kind, item), np.float32(call.offset), out)
    else:
        scale_alone(total, by, out)


@njit(fastmath=EXACT, error_model="numpy")
def silu_mul(gate, up, out):
    for i in range(len(out)):
        x = to_fp32(gate[i])
        e = exp2(np.float32(-LOG2_E) * abs(x))
        share = (np.float32(1) if x > 0 else e) / (np.float32(1) + e)
        out[i] = to_element(x * share * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def gelu_tanh_mul(gate, up, out):
    for i in range(len(out)):
        x = to_fp32(gate[i])
        y = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        e = exp2(np.float32(-2 * LOG2_E) * abs(y))
        share = (np.float32(1) if y > 0 else e) / (np.float32(1) + e)
        out[i] = to_element(x * share * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def rotate_head(x, cos, sin, out):
    half = len(x) // 2
    for i in range(half):
        first, second = to_fp32(x[i]), to_fp32(x[half + i])
        out[i] = to_element(first * to_fp32(cos[i]) + second * to_fp32(sin[i]), out)
        turned = second * to_fp32(cos[half + i]) + first * to_fp32(sin[half + i])
        out[half + i] = to_element(turned, out)


@njit(inline="always")
def rotate_row(call, row, kind, item):
    size, dim = call.size, call.dim
    x = row_of(call.x, row, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    cos = row_of(call.cos, row, dim, dim, kind, item)
    sin = row_of(call.sin, row, dim, dim, kind, item)
    for head in range(0, size, dim):
        rotate_head(x[head : head + dim], cos, sin, out[head : head + dim])


@cache
def rows_kernel(what: int, half: bool) -> CFunc:
    """Return the kernel that applies operation `what` to rows it takes off the counter.

    `what` is a number and not a function, because Numba compiles code that closes over a function
    again in every process.
    """
    kind, item = np.uint16 if half else np.float32, 2 if half else 4

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        size = call.size
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                if what == NORM:
                    norm_row(call, row, kind, item)
                elif what == ROTATION:
                    rotate_row(call, row, kind, item)
                else:
                    both = row_of(call.x, row, call.x_stride, 2 * size, kind, item)
                    out = row_of(call.out, row, size, size, kind, item)
                    if what == SILU:
                        silu_mul(both[:size], both[size:], out)
                    else:
                        gelu_tanh_mul(both[:size], both[size:], out)

    return compiled(over_rows, SIGNATURE, what, half)
