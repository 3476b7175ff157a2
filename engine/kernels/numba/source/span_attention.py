"""Attention within spans of tokens, for CPUs that multiply bf16 (AVX512_BF16).

The keys and the values of a head are packed like the weight of a linear layer (multiply_panel.py).
A thread takes some queries of a head. It computes all their scores, then their weights, then the
sums of values: two products and one softmax. So a row has the same bits whichever rows are with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import KEY_PANEL, SPAN_TASK, SpansCall
from engine.kernels.numba.source.arithmetic import fill, numbers_at
from engine.kernels.numba.source.intrinsics import (
    array_at,
    on_stack,
    take,
    to_element,
)
from engine.kernels.numba.source.linear import multiply_all_rows
from engine.kernels.numba.source.softmax_row import softmax_row

TOGETHER = 4  # rows that registers hold sums of, with panels of 64


class Product(NamedTuple):
    """Rows times a packed weight, with the names of LinearCall's fields. Products are fp32."""

    weight: int
    bias: int
    pairs: int
    split: int
    x: int
    x_bytes: int
    out: int
    out_bytes: int


@njit(inline="always")
def padded(length):
    """Return the keys of a span's panels."""
    return length + -length % KEY_PANEL


@njit(error_model="numpy")
def pack_keys(source, stride, count, dim, target):
    """Pack up to KEY_PANEL keys [count, dim] as [dim / 2, KEY_PANEL, 2], with zeros at the end."""
    pairs = dim // 2
    panel = array_at(target, (pairs, KEY_PANEL), np.uint32)
    for i in range(pairs):
        for t in range(count):
            panel[i, t] = array_at(source + 2 * stride * t, (pairs,), np.uint32)[i]
        for t in range(count, KEY_PANEL):
            panel[i, t] = 0


@njit(error_model="numpy")
def pack_values(source, stride, count, width, target):
    """Pack up to KEY_PANEL values [count, width] as [KEY_PANEL / 2, width, 2], likewise."""
    for j in range(KEY_PANEL // 2):
        first = array_at(source + 2 * stride * 2 * j, (width,), np.uint16)
        second = array_at(source + 2 * stride * (2 * j + 1), (width,), np.uint16)
        packed = array_at(target + 4 * width * j, (width,), np.uint32)
        if 2 * j + 1 < count:
            for d in range(width):
                packed[d] = np.uint32(first[d]) | np.uint32(second[d]) << np.uint32(16)
        elif 2 * j < count:
            for d in range(width):
                packed[d] = np.uint32(first[d])
        else:
            for d in range(width):
                packed[d] = 0


@njit(inline="always")
def weigh(scores, length, factor):
    """Replace a row of scores by weights in bf16; return 1 over their sum."""
    keys = padded(length)
    if length < keys:
        fill(scores, length, keys, np.float32(-np.inf))
    return np.float32(1) / softmax_row(scores, keys, factor)


def pack_kernel(width: int):
    """Return the kernel that packs keys and values, KEY_PANEL tokens of a span at a time."""

    def pack(pointer):
        call = carray(pointer, 1)[0]
        tasks = array_at(call.tasks, (call.num_tasks,), SPAN_TASK)
        dim = call.dim
        while True:
            number = take(call.counter)
            if number >= call.num_tasks:
                return
            task = tasks[number]
            token = task.first_token + task.first_row
            pairs = padded(task.length) // 2
            for head in range(call.heads):
                here = 2 * dim * (call.packed * head + task.packed)
                source = call.key + 2 * (call.key_stride * token + dim * head)
                target = call.keys + here + 2 * dim * task.first_row
                pack_keys(source, call.key_stride, task.rows, dim, target)
                for begin in range(0, dim, width):
                    source = call.value + 2 * (call.value_stride * token + dim * head + begin)
                    target = call.values + here + 4 * pairs * begin + 2 * width * task.first_row
                    pack_values(source, call.value_stride, task.rows, width, target)

    return pack, SpansCall


def attend_kernel(width: int):
    """Return the kernel that attends. Values are packed in panels of `width` numbers."""

    def attend(pointer):
        call = carray(pointer, 1)[0]
        tasks = array_at(call.tasks, (call.num_tasks,), SPAN_TASK)
        dim = call.dim
        factor = np.float32(call.scale)
        scores = on_stack(call.most_scores)
        outputs = on_stack(call.most_rows * dim)
        shares = on_stack(call.most_rows)
        while True:
            number = take(call.counter)
            if number >= call.num_tasks:
                return
            task = tasks[number]
            keys = padded(task.length)
            here = 2 * dim * (call.packed * task.head + task.packed)
            rows = task.rows
            row = task.first_token + task.first_row
            product = Product(
                weight=call.keys + here,
                bias=0,
                pairs=dim // 2,
                split=dim // 2,
                x=call.query + 2 * (call.query_stride * row + dim * task.head),
                x_bytes=2 * call.query_stride,
                out=scores,
                out_bytes=4 * keys,
            )
            for panel in range(keys // KEY_PANEL):
                multiply_all_rows(product, panel, 0, rows, TOGETHER, KEY_PANEL, False, True)
            share = numbers_at(shares, rows)
            for r in range(rows):
                share[r] = weigh(scores + 4 * keys * r, task.length, factor)
            weighted = Product(
                weight=call.values + here,
                bias=0,
                pairs=keys // 2,
                split=keys // 2,
                x=scores,
                x_bytes=4 * keys,
                out=outputs,
                out_bytes=4 * dim,
            )
            for panel in range(dim // width):
                multiply_all_rows(weighted, panel, 0, rows, TOGETHER, width, False, True)
            for r in range(rows):
                begin = ((row + r - call.out_row) * call.heads + task.head) * dim
                out = array_at(call.out + 2 * begin, (dim,), np.uint16)
                output = numbers_at(outputs + 4 * dim * r, dim)
                for d in range(dim):
                    out[d] = to_element(output[d] * share[r], out)

    return attend, SpansCall
