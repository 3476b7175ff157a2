"""Paged attention on a CPU, compiled by Numba. It reads keys and values once, in place.

A query's softmax proceeds block by block (online softmax, arXiv 1805.02867), and its sums key by
key, independently of the other sequences in the step. A token therefore has the same bits alone and
in a batch, in a chunk and as a decode.

Keys are stored transposed in their block, [head_dim, block_size]. A query's scores are then a sum
over head_dim, just as its output is a sum over keys. Both are weights times the rows of a matrix,
so one function (`sum_rows`) computes both.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, njit
from numba.core.ccallback import CFunc

from engine.kernels.numba.call import LOG2_E, TASK, AttentionCall, signature
from engine.kernels.numba.compile import EXACT, compiled
from engine.kernels.numba.exp2 import exp2
from engine.kernels.numba.intrinsics import (
    at,
    highest,
    sum_rows,
    take,
    to_element,
    to_fp32,
    total,
)

SIGNATURE = signature(AttentionCall)
TILE = 8  # tokens of a chunk that read a block while it is in the L1 cache


# ---- arithmetic ------------------------------------------------------------------------------


@njit(fastmath=EXACT, error_model="numpy")
def cap(scores, softcap):
    """Compute softcap * tanh(scores / softcap), in place."""
    for k in range(len(scores)):
        x = scores[k] / softcap
        e = exp2(np.float32(-2 * LOG2_E) * abs(x))
        t = (np.float32(1) - e) / (np.float32(1) + e)
        scores[k] = softcap * (t if x > 0 else -t)


@njit(fastmath=EXACT, error_model="numpy")
def to_weights(scores, top):
    """Replace each score by 2**(score - top).

    A hidden score becomes 2**-126, which is negligible next to 1.
    """
    for k in range(len(scores)):
        scores[k] = exp2(scores[k] - top)


# ---- the kernels -----------------------------------------------------------------------------


@njit(inline="always")
def store_token(call, token, head, dim, block_size, kind):
    """Store one head of the token's key and value in the token's slot."""
    block = carray(at(call.token_blocks), (1,), np.int64)[token]
    offset = carray(at(call.token_offsets), (1,), np.int64)[token]
    key, value = carray(at(call.key), (1,), kind), carray(at(call.value), (1,), kind)
    keys = carray(at(call.keys), (1, call.heads, dim, block_size), kind)
    values = carray(at(call.values), (1, call.heads, block_size, dim), kind)
    for d in range(dim):
        keys[block, head, d, offset] = key[token * call.key_stride + head * dim + d]
    for d in range(dim):
        values[block, head, offset, d] = value[token * call.value_stride + head * dim + d]


@cache
def store_kernel(dim: int, block_size: int, half: bool) -> CFunc:
    """Return the kernel that stores the keys and values that other tasks may read."""
    kind = np.uint16 if half else np.float32

    def store(pointer):
        call = carray(pointer, 1)[0]
        tasks = carray(at(call.tasks), (1, TASK), np.int64)
        while True:
            number = take(call.counter)
            if number >= call.num_tasks * call.heads:
                return
            task = tasks[number // call.heads]
            if task[4]:
                for token in range(task[1], task[1] + task[2]):
                    store_token(call, token, number % call.heads, dim, block_size, kind)

    return compiled(store, SIGNATURE, dim, block_size, half)


@njit(inline="always")
def see_block(softmax, row, blocks, begin, end, softcap, shape):
    """Let a token's `shared` queries, from `row` on, attend to the keys [begin, end) of a block.

    `blocks` holds the addresses of the block's keys, its values, and the keys to prefetch.
    """
    q, sums, tops, totals, keep, scores = softmax
    keys, values, following = blocks
    shared, dim, block_size, half = shape
    queries = q.ctypes.data + 4 * dim * row
    sum_rows(scores.ctypes.data, 0, queries, dim, keys, values, dim, shared, block_size, half)
    for r in range(shared):
        if softcap > 0:
            cap(scores[r], softcap)
        scores[r, :begin] = -np.inf
        scores[r, end:] = -np.inf
        top = max(tops[row + r], highest(scores[r].ctypes.data, block_size))
        keep[r] = exp2(tops[row + r] - top)
        tops[row + r] = top
        to_weights(scores[r], top)
        totals[row + r] = totals[row + r] * keep[r] + total(scores[r].ctypes.data, block_size)
    seen = values + (2 if half else 4) * dim * begin
    weights, outputs = scores.ctypes.data + 4 * begin, sums.ctypes.data + 4 * dim * row
    count = end - begin
    sum_rows(
        outputs, keep.ctypes.data, weights, block_size, seen, following, count, shared, dim, half
    )


@njit(inline="always")
def load_queries(call, task, head, q, shared, dim, kind):
    """Load and scale the task's queries of one kv head."""
    query, scale = carray(at(call.query), (1,), kind), np.float32(call.scale)
    for t in range(task[2]):
        for g in range(shared):
            place = (task[1] + t) * call.query_stride + (head * shared + g) * dim
            for d in range(dim):
                q[t * shared + g, d] = to_fp32(query[place + d]) * scale


@njit(inline="always")
def write_outputs(call, task, head, sums, totals, shared, dim, kind):
    out = carray(at(call.out), (1, call.heads, shared, dim), kind)
    for t in range(task[2]):
        for g in range(shared):
            share = np.float32(1) / totals[t * shared + g]
            for d in range(dim):
                number = sums[t * shared + g, d] * share
                out[task[1] + t, head, g, d] = to_element(number, out)


@cache
def attention_kernel(shared: int, dim: int, block_size: int, half: bool) -> CFunc:
    """Return the kernel that attends, and stores the KV that only its own task reads.

    A kv head has `shared` query heads.
    """
    assert dim % 8 == block_size % 8 == 0
    kind, block_bytes = np.uint16 if half else np.float32, (2 if half else 4) * dim * block_size
    shape, rows = (shared, dim, block_size, half), TILE * shared

    def attend(pointer):
        call = carray(pointer, 1)[0]
        softcap = np.float32(call.softcap)
        tasks = carray(at(call.tasks), (1, TASK), np.int64)
        tables = carray(at(call.tables), (1, call.table_stride), np.int64)
        q, sums = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
        tops, totals = np.empty(rows, np.float32), np.empty(rows, np.float32)
        keep, scores = np.empty(shared, np.float32), np.empty((shared, block_size), np.float32)
        softmax = q, sums, tops, totals, keep, scores
        while True:
            number = take(call.counter)
            if number >= call.num_attended * call.heads:
                return
            head, task = number % call.heads, tasks[number // call.heads]
            table, count, position = tables[task[0]], task[2], task[3]
            if not task[4]:
                store_token(call, task[1], head, dim, block_size, kind)
            load_queries(call, task, head, q, shared, dim, kind)
            now = count * shared
            sums[:now], tops[:now], totals[:now] = np.float32(0), np.float32(-np.inf), np.float32(0)
            last = (position + count - 1) // block_size
            for index in range(max(0, position - call.window + 1) // block_size, last + 1):
                here = block_bytes * (table[index] * call.heads + head)
                then = block_bytes * (table[min(index + 1, last)] * call.heads + head)
                blocks = call.keys + here, call.values + here, call.keys + then
                for t in range(count):
                    end = position + t + 1 - index * block_size
                    begin, end = max(0, end - call.window), min(end, block_size)
                    if begin < end:
                        see_block(softmax, t * shared, blocks, begin, end, softcap, shape)
            write_outputs(call, task, head, sums, totals, shared, dim, kind)

    return compiled(attend, SIGNATURE, shared, dim, block_size, half)
