"""Row-wise operations: norms, activations and rotations, each in one pass over a row."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import (
    GATED_GELU,
    GATED_SILU,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    LOG2_E,
    NORM,
    PAIR_ROTATION,
    ROTATION,
    RowsCall,
)
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import array_at, take, to_element, to_fp32

# Allows vectorized sums over a row. Their order is not sequential, but it is the same in every row.
SUMMING = EXACT | {"reassoc"}
GELU_FACTOR = math.sqrt(2 / math.pi)
ROOT_HALF = math.sqrt(0.5)


# ---- the operations on a row -----------------------------------------------------------------


@njit(inline="always")
def row_of(address, row, stride, size, kind, item):
    """Return a row of the array at this address; an element has `item` bytes."""
    begin = address + item * stride * row
    return array_at(begin, (size,), kind)


@njit(inline="always")
def with_other(call, row, x, kind, item):
    """Return the row x, plus the other row if there is one."""
    size = call.size
    if not call.other:
        return x
    other = row_of(call.other, row, call.other_stride, size, kind, item)
    total = row_of(call.sum, row, size, size, kind, item)
    add(x, other, total)
    return total


@njit(inline="always")
def layer_norm_row(call, row, kind, item):
    """Norm a row around its mean, and first add another to it."""
    size = call.size
    x = row_of(call.x, row, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    total = with_other(call, row, x, kind, item)
    mean = sum_of(total) / np.float32(size)
    variance = square_from(total, mean) / np.float32(size)
    factor = np.float32(1) / np.sqrt(variance + np.float32(call.eps))
    weight = row_of(call.weight, 0, 0, size, kind, item)
    if call.bias:
        scale_from(total, mean, factor, weight, row_of(call.bias, 0, 0, size, kind, item), out)
    else:
        scale_from_alone(total, mean, factor, weight, out)


@njit(inline="always")
def norm_row(call, row, kind, item):
    """Norm a row, and first add another to it; or norm a head of a token."""
    size = call.size
    token = row // call.heads
    head = row % call.heads
    x = row_of(call.x + item * size * head, token, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    total = with_other(call, row, x, kind, item)
    # A sum of its own: in a loop that also writes, its order would depend on where the arrays lie.
    # The compiler's vectorized loop is taken only if they are far enough from each other.
    squares = square(total)
    mean = squares / np.float32(size)
    root = np.sqrt(mean + np.float32(call.eps))
    factor = np.float32(1) / root
    address = call.weight if head < call.key_head else call.key_weight
    if address:
        weight = row_of(address, 0, 0, size, kind, item)
        scale(total, factor, weight, np.float32(call.offset), out)
    else:
        scale_alone(total, factor, out)


@njit(inline="always")
def activate_row(call, row, operation, kind, item):
    size = call.size
    out = row_of(call.out, row, size, size, kind, item)
    if operation in (GELU, GELU_TANH):
        x = row_of(call.x, row, call.x_stride, size, kind, item)
        if operation == GELU:
            gelu(x, out)
        else:
            gelu_tanh(x, out)
        return
    gate_up = row_of(call.x, row, call.x_stride, 2 * size, kind, item)
    gate = gate_up[:size]
    up = gate_up[size:]
    if operation == GATED_SILU:
        silu_mul(gate, up, out)
    elif operation == GATED_GELU:
        gelu_mul(gate, up, out)
    else:
        gelu_tanh_mul(gate, up, out)


@njit(inline="always")
def rotate_row(call, row, operation, kind, item):
    size = call.size
    dim = call.dim
    width = call.width
    x = row_of(call.x, row, call.x_stride, size, kind, item)
    out = row_of(call.out, row, size, size, kind, item)
    cos = row_of(call.cos, row, width, width, kind, item)
    sin = row_of(call.sin, row, width, width, kind, item)
    for begin in range(0, size, dim):
        end = begin + width
        if operation == ROTATION:
            rotate_halves(x[begin:end], cos, sin, out[begin:end])
        else:
            rotate_pairs(x[begin:end], cos, sin, out[begin:end])
        for i in range(end, begin + dim):
            out[i] = x[i]


# ---- loops over elements ---------------------------------------------------------------------


@njit(fastmath=EXACT, error_model="numpy")
def add(x, other, total):
    """Store x + other in `total`, rounded to its type."""
    for i in range(len(total)):
        number = to_fp32(x[i]) + to_fp32(other[i])
        total[i] = to_element(number, total)


@njit(fastmath=SUMMING, error_model="numpy")
def square(x):
    """Return the sum of the squares of x."""
    squares = np.float32(0)
    for i in range(len(x)):
        number = to_fp32(x[i])
        squares += number * number
    return squares


@njit(fastmath=SUMMING, error_model="numpy")
def sum_of(x):
    total = np.float32(0)
    for i in range(len(x)):
        total += to_fp32(x[i])
    return total


@njit(fastmath=SUMMING, error_model="numpy")
def square_from(x, mean):
    """Return the sum of the squares of x - mean."""
    squares = np.float32(0)
    for i in range(len(x)):
        number = to_fp32(x[i]) - mean
        squares += number * number
    return squares


@njit(fastmath=EXACT, error_model="numpy")
def scale_from(x, mean, factor, weight, bias, out):
    """Store (x - mean) * factor * weight + bias in `out`."""
    for i in range(len(out)):
        scaled = (to_fp32(x[i]) - mean) * factor
        out[i] = to_element(scaled * to_fp32(weight[i]) + to_fp32(bias[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def scale_from_alone(x, mean, factor, weight, out):
    """Store (x - mean) * factor * weight in `out`."""
    for i in range(len(out)):
        scaled = (to_fp32(x[i]) - mean) * factor
        out[i] = to_element(scaled * to_fp32(weight[i]), out)


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


@njit(inline="always")
def gelu_of(x):
    """Return x times the standard normal CDF of x, within 2e-7 * |x|.

    The polynomial is that of Abramowitz and Stegun, 7.1.26.
    """
    e = exp2(np.float32(-0.5 * LOG2_E) * x * x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911 * ROOT_HALF) * abs(x))
    y = np.float32(0.5 * 1.061405429)
    y = y * t + np.float32(0.5 * -1.453152027)
    y = y * t + np.float32(0.5 * 1.421413741)
    y = y * t + np.float32(0.5 * -0.284496736)
    y = y * t + np.float32(0.5 * 0.254829592)
    tail = y * t * e  # of the CDF, beyond |x|
    return x * (np.float32(1) - tail if x > 0 else tail)


@njit(inline="always")
def gelu_tanh_of(x):
    """Return gelu by a sigmoid: (1 + tanh(y)) / 2 = sigmoid(2 * y)."""
    cube = np.float32(0.044715) * x * x * x
    y = np.float32(GELU_FACTOR) * (x + cube)
    exponent = np.float32(-2 * LOG2_E) * abs(y)
    e = exp2(exponent)
    numerator = np.float32(1) if y > 0 else e
    sigmoid = numerator / (np.float32(1) + e)
    return x * sigmoid


@njit(fastmath=EXACT, error_model="numpy")
def gelu(x, out):
    for i in range(len(out)):
        out[i] = to_element(gelu_of(to_fp32(x[i])), out)


@njit(fastmath=EXACT, error_model="numpy")
def gelu_tanh(x, out):
    for i in range(len(out)):
        out[i] = to_element(gelu_tanh_of(to_fp32(x[i])), out)


@njit(fastmath=EXACT, error_model="numpy")
def gelu_mul(gate, up, out):
    for i in range(len(out)):
        out[i] = to_element(gelu_of(to_fp32(gate[i])) * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def gelu_tanh_mul(gate, up, out):
    for i in range(len(out)):
        out[i] = to_element(gelu_tanh_of(to_fp32(gate[i])) * to_fp32(up[i]), out)


@njit(fastmath=EXACT, error_model="numpy")
def rotate_halves(x, cos, sin, out):
    half = len(x) // 2
    for i in range(half):
        j = half + i
        first = to_fp32(x[i])
        second = to_fp32(x[j])
        turned = first * to_fp32(cos[i]) + second * to_fp32(sin[i])
        out[i] = to_element(turned, out)
        turned = second * to_fp32(cos[j]) + first * to_fp32(sin[j])
        out[j] = to_element(turned, out)


@njit(fastmath=EXACT, error_model="numpy")
def rotate_pairs(x, cos, sin, out):
    for i in range(0, len(x), 2):
        j = i + 1
        first = to_fp32(x[i])
        second = to_fp32(x[j])
        turned = first * to_fp32(cos[i]) + second * to_fp32(sin[i])
        out[i] = to_element(turned, out)
        turned = second * to_fp32(cos[j]) + first * to_fp32(sin[j])
        out[j] = to_element(turned, out)


# ---- the kernel ------------------------------------------------------------------------------


def rows_kernel(operation: int, half: bool):
    """Return the kernel that applies `operation` to rows it takes off the counter."""
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
                elif operation == LAYER_NORM:
                    layer_norm_row(call, row, kind, item)
                elif operation in (ROTATION, PAIR_ROTATION):
                    rotate_row(call, row, operation, kind, item)
                else:
                    activate_row(call, row, operation, kind, item)

    return over_rows, RowsCall
