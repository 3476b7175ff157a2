"""Paged attention on a CPU, compiled by Numba. It reads keys and values once, in place.

A query's softmax proceeds span by span (online softmax, arXiv 1805.02867; spans.py), and its sums
key by key, independently of the other sequences in the step. A token therefore has the same bits
alone and in a batch, in a chunk and as a decode.

Keys are stored transposed in their block, [head_dim, block_size]. A query's scores are then a sum
over head_dim, just as its output is a sum over keys. Both are weights times the rows of a matrix,
so one function (`sum_rows`) computes both.

Keys and values may be codes with a scale for each token. A score is then multiplied by its key's
scale, and a weight by its value's.

If values are the first numbers of keys, they are transposed block by block, into room that stays in
the cache of the core. The query heads of a kv head may be computed in parts, by several threads.

NOTE: Passing an array, or a tuple of arrays, through two levels of inlined functions makes Numba
count references with atomic instructions in the inner loop. So functions pass addresses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import (
    AS_BF16,
    IN_PAIRS,
    ITEM_BYTES,
    LOG2_E,
    TASK,
    TILE,
    WEIGHT_BYTES,
    AttentionCall,
)
from engine.kernels.numba.source.arithmetic import cap, fill, multiply, numbers_at, to_weights
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import (
    LANES,
    add_in_lanes,
    array_at,
    highest,
    on_stack,
    round_to_bf16,
    take,
    to_element,
    to_fp32,
    total,
)
from engine.kernels.numba.source.spans import (
    Blocks,
    last_key,
    load_span,
    look_ahead,
    span_blocks,
    span_on_stack,
    value_vectors,
)
from engine.kernels.numba.source.store_kv import prefetch_stored, token_store
from engine.kernels.numba.source.sum_rows import sum_rows, tile_height
from engine.kernels.numba.source.sum_tiles import LANES as VECTOR
from engine.kernels.numba.source.sum_tiles import ROWS_TOGETHER
from engine.kernels.numba.source.transpose import transpose


class Softmax(NamedTuple):
    """Addresses of a task's softmax, in fp32. A token has a row for each of its query heads.

    For keys and values in pairs, queries and weights are bf16, and the scores are scaled instead.

    `keep` and `scores` are of the rows that see a span together.
    """

    queries: int  # [rows, dim], scaled
    outputs: int  # [rows, value_dim]: sums of weighted values
    tops: int  # [rows]: highest scores so far
    totals: int  # [rows, LANES]: sums of weights, one for each lane of a vector
    keep: int  # [rows]: factors of older sums once the highest scores have risen
    scores: int  # [rows, span_keys]: scores in one span, then their weights


@njit(inline="always")
def load_queries(call, task, part, queries, kind, item, in_pairs):
    """Load the task's queries of one part of the heads, and scale them unless `in_pairs`."""
    shared = call.shared
    dim = call.dim
    scale = np.float32(call.scale)
    numbers = shared * dim
    for t in range(task.num_tokens):
        token = task.first_token + t
        begin = token * call.query_stride + part * numbers
        query = array_at(call.query + item * begin, (numbers,), kind)
        if in_pairs:
            copied = array_at(queries + item * t * numbers, (numbers,), kind)
            for d in range(numbers):
                copied[d] = query[d]
            continue
        loaded = numbers_at(queries + 4 * t * numbers, numbers)
        for d in range(numbers):
            loaded[d] = to_fp32(query[d]) * scale


@njit(inline="always")
def visible_blocks(call, task):
    """Return the first block of the task's sequence that a token of the task sees, and the end."""
    first = max(0, task.position - call.window + 1) // call.block_size
    last = last_key(call, task, task.num_tokens - 1)
    length = min(last + 1 + call.later, task.num_keys)
    return first, (length - 1) // call.block_size + 1


@njit(inline="always")
def copy_values(call, span, task, index, form):
    """Transpose the first numbers of the keys of block `index`, which are its values."""
    _, end = visible_keys(task, task.num_tokens - 1, index, call.block_size, call)
    keys = array_at(span.keys, (1,), np.int64)[0]
    transpose(keys, span.copies, call.value_dim, end, call.block_size, call.value_dim, form)


@njit(inline="always")
def visible_keys(task, t, index, size, call):
    """Return the range of keys in span `index`, of `size` keys, that the task's token `t` sees."""
    before = index * size
    begin = task.position + t + 1 - before - call.window
    end = min(last_key(call, task, t) + 1 - before + call.later, task.num_keys - before)
    return max(0, begin), min(end, size)


@njit(inline="always")
def all_see(task, t, tokens, index, size, call):
    """Whether the task has `tokens` tokens, from `t` on, and each sees a key of span `index`.

    The first token sees the fewest keys at the end of the span. With a window, the last token sees
    the fewest at its beginning.
    """
    last = t + tokens - 1
    _, end = visible_keys(task, t, index, size, call)
    begin, _ = visible_keys(task, last, index, size, call)
    return last < task.num_tokens and begin < size and end > 0


@njit(inline="always")
def see_span(softmax, task, t, tokens, index, span, size, call, height, form):
    """Let the queries of `tokens` tokens, from `t` on, attend to span `index` of `size` keys.

    Each of the tokens sees at least one key of the span. A key that only some tokens see gets the
    weight 0 for the others. Its value is stored already, because it belongs to the same sequence.
    """
    has_scales = ITEM_BYTES[form] == 1
    in_pairs = form == IN_PAIRS
    shared = call.shared
    softcap = np.float32(call.softcap)
    row = t * shared
    rows = tokens * shared
    first, _ = visible_keys(task, t, index, size, call)
    _, last = visible_keys(task, t + tokens - 1, index, size, call)
    # Begin with the first block that one of the tokens sees, and end with a whole vector of scores.
    left = first - first % call.block_size
    seen = last - left + -last % LANES
    sum_scores(softmax, row, rows, left, seen, span, size, call, height, form)
    scores = softmax.scores + 4 * left
    for i in range(tokens):
        begin, end = visible_keys(task, t + i, index, size, call)
        begin -= left
        end -= left
        hides = begin > 0 or end < seen
        for g in range(shared):
            r = i * shared + g
            if has_scales:
                multiply(scores, seen, span.key_scales + 4 * left)
            if softcap > 0:
                cap(scores, seen, softcap)
            if hides:
                fill(scores, 0, begin, np.float32(-np.inf))
                fill(scores, end, seen, np.float32(-np.inf))
            top = raise_top(softmax, row, r, highest(scores, seen))
            to_weights(scores, seen, top)
            if hides:
                fill(scores, 0, begin, np.float32(0))
                fill(scores, end, seen, np.float32(0))
            add_weights(softmax, row, r, scores, seen)
            if has_scales:
                multiply(scores, seen, span.value_scales + 4 * left)
                if hides:  # a hidden key's scale may be NaN
                    fill(scores, 0, begin, np.float32(0))
                    fill(scores, end, seen, np.float32(0))
            if in_pairs:
                round_to_bf16(scores, seen)
            scores += 4 * size
    sum_values(softmax, row, rows, left, last, span, size, call, height, form)


@njit(inline="always")
def sum_scores(softmax, row, rows, left, seen, span, size, call, height, form):
    """Compute the scores of the rows from `row` on for `seen` keys of the span from `left` on."""
    dim = call.dim
    vector = left // VECTOR
    sum_rows(
        out=softmax.scores + 4 * left,
        width=size,
        keep=0,
        weights=softmax.queries + WEIGHT_BYTES[form] * dim * row,
        stride=dim,
        parts=span.keys + 8 * vector,
        ahead=span.ahead_keys + 8 * vector,
        vectors=0,  # one part has all rows
        part_rows=dim,
        row_bytes=ITEM_BYTES[form] * call.block_size,
        count=dim,
        factor=np.float32(call.scale),
        rows=rows,
        height=height,
        columns=seen,
        form=form,
    )


@njit(inline="always")
def sum_values(softmax, row, rows, begin, end, span, size, call, height, form):
    """Add the weighted values of the keys [begin, end) to the outputs of the rows from `row` on.

    `begin` is the first key of a block.
    """
    dim = call.value_dim
    vectors = value_vectors(call)
    block = begin // call.block_size
    sum_rows(
        out=softmax.outputs + 4 * dim * row,
        width=dim,
        keep=softmax.keep,
        weights=softmax.scores + 4 * begin,
        stride=4 * size // WEIGHT_BYTES[form],
        parts=span.values + 8 * vectors * block,
        ahead=span.ahead_values + 8 * vectors * block,
        vectors=vectors,
        part_rows=call.block_size,
        row_bytes=ITEM_BYTES[form] * dim,
        count=end - begin,
        factor=np.float32(1),
        rows=rows,
        height=height,
        columns=dim,
        form=form,
    )


@njit(inline="always")
def raise_top(softmax, row, r, new):
    """Return the highest score so far of the query `row` + `r`, once `new` is counted, too."""
    tops = numbers_at(softmax.tops, 1)
    keep = numbers_at(softmax.keep, 1)
    old = tops[row + r]
    top = max(old, new)
    keep[r] = exp2(old - top) if top > old else np.float32(1)  # 2**0, which is usual, is 1
    tops[row + r] = top
    return top


@njit(inline="always")
def add_weights(softmax, row, r, weights, count):
    """Add weights to the totals of the query `row` + `r`."""
    keep = numbers_at(softmax.keep, 1)
    add_in_lanes(softmax.totals + 4 * LANES * (row + r), keep[r], weights, count)


@njit(inline="always")
def begin_softmax(call, task, part, softmax, kind):
    """Set outputs, highest scores and sums of weights as they are before any key.

    A sink is like a key that was seen already, whose value is 0.
    """
    rows = task.num_tokens * call.shared
    fill(softmax.outputs, 0, rows * call.value_dim, np.float32(0))
    fill(softmax.tops, 0, rows, np.float32(-np.inf))
    fill(softmax.totals, 0, rows * LANES, np.float32(0))
    if call.sinks:
        sinks = array_at(call.sinks, (1,), kind)
        tops = numbers_at(softmax.tops, rows)
        totals = numbers_at(softmax.totals, rows * LANES)
        for r in range(rows):
            totals[LANES * r] = 1
        for t in range(task.num_tokens):
            for g in range(call.shared):
                score = to_fp32(sinks[part * call.shared + g])
                tops[t * call.shared + g] = score * np.float32(LOG2_E)


@njit(inline="always")
def write_outputs(call, task, part, softmax, kind, item):
    shared = call.shared
    dim = call.value_dim
    parts = call.heads * call.parts
    for t in range(task.num_tokens):
        token = task.first_token + t
        for g in range(shared):
            row = t * shared + g
            begin = ((token * parts + part) * shared + g) * dim
            out = array_at(call.out + item * begin, (dim,), kind)
            output = numbers_at(softmax.outputs + 4 * row * dim, dim)
            share = np.float32(1) / total(softmax.totals + 4 * LANES * row, LANES)
            for d in range(dim):
                number = output[d] * share
                out[d] = to_element(number, out)


@njit(inline="always")
def tokens_together(shared):
    """Return how many of a task's tokens see a block together: as many as have few enough rows.

    `sum_rows` then loads each number of the block once for all of them.
    """
    tokens = TILE
    while tokens > 1 and tokens * shared > ROWS_TOGETHER:
        tokens //= 2
    return tokens


@njit(inline="always")
def part_of_task(call, number):
    """Return the index of a task, the longest first, and the part of the heads to compute."""
    parts = call.heads * call.parts
    return call.num_attended - 1 - number // parts, number % parts


@njit(inline="always")
def first_span(call, number, form):
    """Return the first blocks of a task that begins later; prefetch where its token is stored."""
    index, part = part_of_task(call, number)
    task = array_at(call.tasks, (1,), TASK)[index]
    head = part // call.parts
    if not task.is_stored_ahead:
        prefetch_stored(call, task.first_token, head, form)
    begin, end = visible_blocks(call, task)
    return Blocks(task.sequence, head, begin - begin % span_blocks(call), end)


def attention_kernel(half: bool, form: int):
    """Return the kernel that attends, and stores the KV that only its own task reads.

    Queries are bf16 if `half`, else fp32. With keys and values IN_PAIRS they are bf16.
    """
    in_pairs = form == IN_PAIRS
    kept_as = AS_BF16 if in_pairs else form
    kind = np.uint16 if half else np.float32
    item = 2 if half else 4
    store_token = token_store(half, kept_as)

    def attend(pointer):
        call = carray(pointer, 1)[0]
        tasks = array_at(call.tasks, (1,), TASK)
        together = tokens_together(call.shared)
        height = tile_height(together * call.shared)
        rows = TILE * call.shared
        blocks = span_blocks(call)
        size = blocks * call.block_size
        softmax = Softmax(
            on_stack(rows * call.dim),
            on_stack(rows * call.value_dim),
            on_stack(rows),
            on_stack(rows * LANES),
            on_stack(together * call.shared),
            on_stack(together * call.shared * size),
        )
        span = span_on_stack(call, kept_as)
        count = call.num_attended * call.heads * call.parts
        number = take(call.counter)
        while number < count:
            chosen, part = part_of_task(call, number)
            task = tasks[chosen]
            head = part // call.parts
            if not task.is_stored_ahead:
                store_token(call, task.first_token, head)
            load_queries(call, task, part, softmax.queries, kind, item, in_pairs)
            begin_softmax(call, task, part, softmax, kind)
            first, end = visible_blocks(call, task)
            for index in range(first // blocks, (end - 1) // blocks + 1):
                begin = index * blocks
                following = Blocks(task.sequence, head, begin + blocks, end)
                here = Blocks(task.sequence, head, begin, min(begin + blocks, end))
                load_span(call, span, here, kept_as)
                if following.begin >= end:
                    # Taken so early that its first span is in the cache when it is computed.
                    number = take(call.counter)
                    following = first_span(call, min(number, count - 1), kept_as)
                look_ahead(call, span, following, kept_as)
                if not call.values:
                    copy_values(call, span, task, index, kept_as)
                t = 0
                while t < task.num_tokens:
                    tokens = together if all_see(task, t, together, index, size, call) else 1
                    if tokens > 1 or all_see(task, t, 1, index, size, call):
                        see_span(softmax, task, t, tokens, index, span, size, call, height, form)
                    t += tokens
            write_outputs(call, task, part, softmax, kind, item)

    return attend, AttentionCall
