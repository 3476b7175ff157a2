"""Depthwise causal convolution on a CPU, token by token.

A task is a tile of channels, for all runs, so its weights are converted once. The inputs of a run's
last tokens are kept as fp32 in a ring, and converted once, too. A sum adds its terms from the
oldest input on, at any place in a run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import ConvCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.gates import sigmoid
from engine.kernels.numba.source.intrinsics import (
    LANES,
    array_at,
    on_stack,
    take,
    to_element,
    to_exact_element,
    to_fp32,
)
from engine.kernels.numba.source.padding import write_padding

TILE = 512  # the most channels of a task
STEP = 2 * LANES  # a tile begins at a multiple of it: bf16 fill a cache line


class Room(NamedTuple):
    """Addresses of fp32 numbers on the stack."""

    inputs: int  # [width, TILE]: the newest inputs, at their token modulo `width`
    weights: int  # [width, TILE], of the oldest input first
    sums: int  # [TILE]


@njit(inline="always")
def row_at(address, row, count):
    """Return a row of an array [..., TILE] of fp32."""
    return array_at(address + 4 * TILE * row, (count,), np.float32)


@njit(fastmath=EXACT, error_model="numpy")
def convert(numbers, out):
    """Store the numbers as fp32."""
    for i in range(len(out)):
        out[i] = to_fp32(numbers[i])


@njit(fastmath=EXACT, error_model="numpy")
def convert_column(numbers, column, out):
    """Store a column of the numbers as fp32."""
    for i in range(len(out)):
        out[i] = to_fp32(numbers[i, column])


@njit(fastmath=EXACT, error_model="numpy")
def multiply(weights, inputs, sums):
    for i in range(len(sums)):
        sums[i] = weights[i] * inputs[i]


@njit(fastmath=EXACT, error_model="numpy")
def add_product(weights, inputs, sums):
    for i in range(len(sums)):
        sums[i] += weights[i] * inputs[i]


@njit(fastmath=EXACT, error_model="numpy")
def add(bias, sums):
    for i in range(len(sums)):
        sums[i] += to_fp32(bias[i])


@njit(fastmath=EXACT, error_model="numpy")
def store(sums, out):
    for i in range(len(out)):
        out[i] = to_element(sums[i], out)


@njit(fastmath=EXACT, error_model="numpy")
def store_unrounded(inputs, out):
    """Store inputs that the type of `out` holds exactly: they were read from such numbers."""
    for i in range(len(out)):
        out[i] = to_exact_element(inputs[i], out)


@njit(fastmath=EXACT, error_model="numpy")
def store_silu(sums, out):
    for i in range(len(out)):
        out[i] = to_element(sums[i] * sigmoid(sums[i]), out)


@njit(inline="always")
def compute_run(call, run, left, count, room, kind, item):
    """Compute the tokens of a run for `count` channels from `left` on."""
    starts = array_at(call.starts, (1,), np.int64)
    writes = array_at(call.writes, (1,), np.int64)
    width = call.width
    past = width - 1
    row_bytes = item * call.channels
    tails = call.tails + item * left  # the tile in slot 0
    tail = tails + row_bytes * past * array_at(call.reads, (1,), np.int64)[run]
    for age in range(past):
        old = array_at(tail + row_bytes * age, (count,), kind)
        convert(old, row_at(room.inputs, age, count))
    newest = past
    for token in range(starts[run], starts[run + 1]):
        x = array_at(call.x + item * (token * call.x_stride + left), (count,), kind)
        convert(x, row_at(room.inputs, newest, count))
        oldest = (newest + 1) % width
        sum_inputs(call, left, count, room, oldest, kind, item)
        out = array_at(call.out + item * (token * call.channels + left), (count,), kind)
        if call.silu:
            store_silu(row_at(room.sums, 0, count), out)
        else:
            store(row_at(room.sums, 0, count), out)
        if writes[token]:
            slot = tails + row_bytes * past * writes[token]
            for age in range(past):
                place = (oldest + 1 + age) % width
                kept = array_at(slot + row_bytes * age, (count,), kind)
                store_unrounded(row_at(room.inputs, place, count), kept)
        newest = oldest


@njit(inline="always")
def sum_inputs(call, left, count, room, oldest, kind, item):
    """Compute the sums of the inputs in the ring, and add the bias."""
    width = call.width
    sums = row_at(room.sums, 0, count)
    multiply(row_at(room.weights, 0, count), row_at(room.inputs, oldest, count), sums)
    for age in range(1, width):
        place = (oldest + age) % width
        add_product(row_at(room.weights, age, count), row_at(room.inputs, place, count), sums)
    if call.bias:
        add(array_at(call.bias + item * left, (count,), kind), sums)


@njit(inline="always")
def divided(number, divisor):
    """Return the quotient, rounded up."""
    return (number + divisor - 1) // divisor


def conv_kernel(half: bool):
    """Return the kernel. All tensors are bf16 if `half`, else fp32."""
    kind = np.uint16 if half else np.float32
    item = 2 if half else 4

    def over_tiles(pointer):
        call = carray(pointer, 1)[0]
        width = call.width
        room = Room(on_stack(width * TILE), on_stack(width * TILE), on_stack(TILE))
        tiles = divided(call.channels, TILE)
        size = STEP * divided(divided(call.channels, tiles), STEP)  # all tasks take equally long
        tiles = divided(call.channels, size)
        while True:
            number = take(call.counter)
            if number > tiles:
                return
            if number == tiles:
                write_padding(call, call.channels, kind, item)
                continue
            left = number * size
            count = min(size, call.channels - left)
            weights = array_at(call.weight + item * left * width, (count, width), kind)
            for age in range(width):
                convert_column(weights, age, row_at(room.weights, age, count))
            for run in range(call.runs):
                compute_run(call, run, left, count, room, kind, item)

    return over_tiles, ConvCall
