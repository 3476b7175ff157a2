"""Rows that are multiplied by gates: attention outputs, and norms before or behind the gate."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import GATE_THEN_NORM, SIGMOID_MUL, GatedCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.gates import sigmoid
from engine.kernels.numba.source.intrinsics import array_at, on_stack, take, to_element, to_fp32
from engine.kernels.numba.source.rowwise import scale, square


@njit(inline="always")
def row_at(address, token, head, stride, head_stride, size, kind, item):
    """Return a row of an array [tokens, heads, size]."""
    begin = token * stride + head * head_stride
    return array_at(address + item * begin, (size,), kind)


@njit(fastmath=EXACT, error_model="numpy")
def sigmoid_mul(x, gate, out):
    for i in range(len(out)):
        out[i] = to_element(to_fp32(x[i]) * sigmoid(to_fp32(gate[i])), out)


@njit(fastmath=EXACT, error_model="numpy")
def silu_mul(x, gate, out):
    """Store x * silu(gate) as fp32."""
    for i in range(len(out)):
        g = to_fp32(gate[i])
        out[i] = to_fp32(x[i]) * (g * sigmoid(g))


@njit(fastmath=EXACT, error_model="numpy")
def scale_gated(x, factor, weight, gate, out):
    """Store x * factor * weight * silu(gate)."""
    for i in range(len(out)):
        g = to_fp32(gate[i])
        normed = to_fp32(x[i]) * factor * to_fp32(weight[i])
        out[i] = to_element(normed * (g * sigmoid(g)), out)


@njit(inline="always")
def factor_of(x, eps):
    """Return 1 / rms(x)."""
    mean = square(x) / np.float32(len(x))
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


def gated_kernel(operation: int, half: bool):
    """Return the kernel that applies `operation` to rows it takes off the counter."""
    kind = np.uint16 if half else np.float32
    item = 2 if half else 4

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        size = call.size
        room = array_at(on_stack(size), (size,), np.float32)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                token = row // call.heads
                head = row % call.heads
                x = row_at(call.x, token, head, call.x_stride, call.x_head, size, kind, item)
                gate = row_at(
                    call.gate, token, head, call.gate_stride, call.gate_head, size, kind, item
                )
                weight = row_at(call.weight, 0, head, 0, call.weight_head, size, kind, item)
                out = row_at(call.out, row, 0, size, 0, size, kind, item)
                if operation == SIGMOID_MUL:
                    sigmoid_mul(x, gate, out)
                elif operation == GATE_THEN_NORM:
                    silu_mul(x, gate, room)
                    scale(room, factor_of(room, call.eps), weight, np.float32(0), out)
                else:
                    scale_gated(x, factor_of(x, call.eps), weight, gate, out)

    return over_rows, GatedCall
