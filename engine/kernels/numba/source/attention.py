"""Paged attention on a CPU, compiled by Numba. It reads keys and values once, in place.

A query's softmax proceeds block by block (online softmax, arXiv 1805.02867), and its sums key by
key, independently of the other sequences in the step. A token therefore has the same bits alone and
in a batch, in a chunk and as a decode.

Keys are stored transposed in their block, [head_dim, block_size]. A query's scores are then a sum
over head_dim, just as its output is a sum over keys. Both are weights times the rows of a matrix,
so one function (`sum_rows`) computes both.

Keys and values may be codes with a scale for each token. A score is then multiplied by its key's
scale, and a weight by its value's.

NOTE: Passing an array, or a tuple of arrays, through two levels of inlined functions makes Numba
count references with atomic instructions in the inner loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import ITEM_BYTES, LOG2_E, TASK, TILE, AttentionCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import (
    array_at,
    highest,
    on_stack,
    take,
    to_element,
    to_fp32,
    total,
)
from engine.kernels.numba.source.store_kv import token_store
from engine.kernels.numba.source.sum_rows import MAX_ROWS, sum_rows


class Softmax(NamedTuple):
    """The softmax of a task, in fp32. A token has a row for each of the `shared` query heads.

    `keep` and `scores` are of the rows that see a block together.
    """

    queries: np.ndarray  # [rows, dim], scaled
    outputs: np.ndarray  # [rows, dim]: sums of weighted values
    tops: np.ndarray  # [rows]: highest scores so far
    totals: np.ndarray  # [rows]: sums of weights
    keep: np.ndarray  # [rows]: factors of older sums once the highest scores have risen
    scores: np.ndarray  # [rows, block_size]: scores in one block, then their weights


class Block(NamedTuple):
    """Addresses of one kv head's part of a block."""

    keys: int
    values: int
    next_keys: int  # those of the sequence's next block, to prefetch
    key_scales: int
    value_scales: int


# ---- arithmetic ------------------------------------------------------------------------------


@njit(fastmath=EXACT, error_model="numpy")
def cap(scores, softcap):
    """Compute softcap * tanh(scores / softcap), in place."""
    for k in range(len(scores)):
        x = scores[k] / softcap
        exponent = np.float32(-2 * LOG2_E) * abs(x)
        e = exp2(exponent)
        magnitude = (np.float32(1) - e) / (np.float32(1) + e)
        tanh = magnitude if x > 0 else -magnitude
        scores[k] = softcap * tanh


@njit(fastmath=EXACT, error_model="numpy")
def to_weights(scores, top):
    """Replace each score by 2**(score - top).

    A hidden score becomes 2**-126, which is negligible next to 1.
    """
    for k in range(len(scores)):
        scores[k] = exp2(scores[k] - top)


@njit(inline="always")
def scale(numbers, address):
    """Multiply numbers by the scales at this address, in place."""
    scales = array_at(address, (len(numbers),), np.float32)
    for k in range(len(numbers)):
        numbers[k] *= scales[k]


# ---- the kernel that attends -----------------------------------------------------------------


@njit(inline="always")
def load_queries(call, task, head, queries, shared, dim, kind):
    """Load and scale the task's queries of one kv head."""
    query = array_at(call.query, (1,), kind)
    scale = np.float32(call.scale)
    for t in range(task.num_tokens):
        token = task.first_token + t
        for g in range(shared):
            row = t * shared + g
            query_head = head * shared + g
            begin = token * call.query_stride + query_head * dim
            for d in range(dim):
                queries[row, d] = to_fp32(query[begin + d]) * scale


@njit(inline="always")
def block_at(call, table, head, index, last, block_bytes, block_size):
    """Return the sequence's block `index`. The last block prefetches its own keys."""
    following = min(index + 1, last)
    number = table[index] * call.heads + head
    here = block_bytes * number
    ahead = block_bytes * (table[following] * call.heads + head)
    scales = 4 * block_size * number
    return Block(
        call.keys + here,
        call.values + here,
        call.keys + ahead,
        call.key_scales + scales,
        call.value_scales + scales,
    )


@njit(inline="always")
def visible_keys(task, t, index, window, block_size):
    """Return the range of keys in the sequence's block `index` that the task's token `t` sees."""
    end = task.position + t + 1 - index * block_size
    begin = max(0, end - window)
    return begin, min(end, block_size)


@njit(inline="always")
def all_see(task, t, index, window, shape):
    """Whether the task has the shape's tokens, from `t` on, and each sees a key of block `index`.

    The first token sees the fewest keys at the end of the block. With a window, the last token sees
    the fewest at its beginning.
    """
    tokens, _, _, _, block_size, _, _ = shape
    last = t + tokens - 1
    _, end = visible_keys(task, t, index, window, block_size)
    begin, _ = visible_keys(task, last, index, window, block_size)
    return last < task.num_tokens and begin < block_size and end > 0


@njit(inline="always")
def see_block(softmax, task, t, index, block, call, shape):
    """Let the queries of the shape's tokens, from `t` on, attend to the sequence's block `index`.

    Each of the tokens sees at least one key of the block. A key that only some tokens see gets the
    weight 0 for the others. Its value is stored already, because it belongs to the same sequence.
    """
    queries, outputs, tops, totals, keep, scores = softmax
    tokens, _, shared, dim, block_size, _, item = shape
    window = call.window
    softcap = np.float32(call.softcap)
    row = t * shared
    query = queries.ctypes.data + 4 * dim * row
    output = outputs.ctypes.data + 4 * dim * row
    sum_scores(scores.ctypes.data, query, block, shape)
    first, _ = visible_keys(task, t, index, window, block_size)
    _, last = visible_keys(task, t + tokens - 1, index, window, block_size)
    for i in range(tokens):
        begin, end = visible_keys(task, t + i, index, window, block_size)
        for g in range(shared):
            r = i * shared + g
            if item == 1:
                scale(scores[r], block.key_scales)
            if softcap > 0:
                cap(scores[r], softcap)
            scores[r, :begin] = -np.inf
            scores[r, end:] = -np.inf
            weigh(scores[r], tops, totals, keep, row, r, block_size)
            if item == 1:
                scale(scores[r], block.value_scales)
            scores[r, first:begin] = np.float32(0)
            scores[r, end:last] = np.float32(0)
    weights = scores.ctypes.data
    sum_values(output, keep.ctypes.data, weights, block, first, last, shape)


@njit(inline="always")
def sum_scores(scores, query, block, shape):
    """Compute the tokens' scores for all keys of the block; arguments are addresses."""
    _, rows, _, dim, block_size, form, _ = shape
    sum_rows(
        out=scores,
        keep=0,
        weights=query,
        stride=dim,
        matrix=block.keys,
        ahead=block.values,
        count=dim,
        rows=rows,
        width=block_size,
        form=form,
    )


@njit(inline="always")
def sum_values(output, keep, weights, block, begin, end, shape):
    """Add the weighted values of the keys [begin, end) to the outputs; arguments are addresses."""
    _, rows, _, dim, block_size, form, item = shape
    first_value = block.values + item * dim * begin
    sum_rows(
        out=output,
        keep=keep,
        weights=weights + 4 * begin,
        stride=block_size,
        matrix=first_value,
        ahead=block.next_keys,
        count=end - begin,
        rows=rows,
        width=dim,
        form=form,
    )


@njit(inline="always")
def weigh(scores, tops, totals, keep, row, r, block_size):
    """Turn the scores of a token's query `r` into weights, and add them to the query's total."""
    old_top = tops[row + r]
    new_top = highest(scores.ctypes.data, block_size)
    top = max(old_top, new_top)
    keep[r] = exp2(old_top - top)
    tops[row + r] = top
    to_weights(scores, top)
    kept = totals[row + r] * keep[r]
    weight = total(scores.ctypes.data, block_size)
    totals[row + r] = kept + weight


@njit(inline="always")
def begin_softmax(call, head, tops, totals, used, shared, kind):
    """Set the highest score and the sum of weights of each row as they are before any key.

    A sink is like a key that was seen already, whose value is 0.
    """
    tops[:used] = np.float32(-np.inf)
    totals[:used] = np.float32(0)
    if call.sinks:
        sinks = array_at(call.sinks, (1, shared), kind)
        for row in range(used):
            score = to_fp32(sinks[head, row % shared])
            tops[row] = score * np.float32(LOG2_E)
            totals[row] = np.float32(1)


@njit(inline="always")
def write_outputs(call, task, head, outputs, totals, shared, dim, kind):
    out = array_at(call.out, (1, call.heads, shared, dim), kind)
    for t in range(task.num_tokens):
        token = task.first_token + t
        for g in range(shared):
            row = t * shared + g
            share = np.float32(1) / totals[row]
            for d in range(dim):
                number = outputs[row, d] * share
                out[token, head, g, d] = to_element(number, out)


def tokens_together(shared: int) -> int:
    """Return how many of a task's tokens see a block together: as many as have few enough rows.

    `sum_rows` then loads each number of the block once for all of them. Their number divides TILE.
    """
    fitting = [n for n in range(1, TILE + 1) if TILE % n == 0 and n * shared <= MAX_ROWS]
    return max(fitting, default=1)


def attention_kernel(shared: int, dim: int, block_size: int, half: bool, form: int):
    """Return the kernel that attends, and stores the KV that only its own task reads.

    A kv head has `shared` query heads. Queries are bf16 if `half`, else fp32.
    """
    assert dim % 8 == block_size % 8 == 0
    kind = np.uint16 if half else np.float32
    item = ITEM_BYTES[form]
    store_token = token_store(dim, block_size, half, form)
    block_bytes = item * dim * block_size
    together = tokens_together(shared)
    # A constant of the kernel must be a name: Numba compiles a product of names as a number.
    rows = TILE * shared
    rows_together = together * shared
    row_numbers = rows * dim
    score_numbers = rows_together * block_size
    several = (together, rows_together, shared, dim, block_size, form, item)
    single = (1, shared, shared, dim, block_size, form, item)

    def attend(pointer):
        call = carray(pointer, 1)[0]
        tasks = array_at(call.tasks, (1,), TASK)
        tables = array_at(call.tables, (1, call.table_stride), np.int64)
        queries = array_at(on_stack(row_numbers), (rows, dim), np.float32)
        outputs = array_at(on_stack(row_numbers), (rows, dim), np.float32)
        tops = array_at(on_stack(rows), (rows,), np.float32)
        totals = array_at(on_stack(rows), (rows,), np.float32)
        keep = array_at(on_stack(rows_together), (rows_together,), np.float32)
        scores = array_at(on_stack(score_numbers), (rows_together, block_size), np.float32)
        softmax = Softmax(queries, outputs, tops, totals, keep, scores)
        while True:
            number = take(call.counter)
            if number >= call.num_attended * call.heads:
                return
            task = tasks[call.num_attended - 1 - number // call.heads]  # the longest first
            head = number % call.heads
            if not task.is_stored_ahead:
                store_token(call, task.first_token, head)
            load_queries(call, task, head, queries, shared, dim, kind)
            used = task.num_tokens * shared
            outputs[:used] = np.float32(0)
            begin_softmax(call, head, tops, totals, used, shared, kind)
            table = tables[task.sequence]
            first = max(0, task.position - call.window + 1) // block_size
            last = (task.position + task.num_tokens - 1) // block_size
            for index in range(first, last + 1):
                block = block_at(call, table, head, index, last, block_bytes, block_size)
                t = 0
                while t < task.num_tokens:
                    if all_see(task, t, index, call.window, several):
                        see_block(softmax, task, t, index, block, call, several)
                        t += together
                        continue
                    if all_see(task, t, index, call.window, single):
                        see_block(softmax, task, t, index, block, call, single)
                    t += 1
            write_outputs(call, task, head, outputs, totals, shared, dim, kind)

    return attend, AttentionCall
