"""Decode attention in one launch: head norms, rotation, KV store, splits and their reduction.

Programs take the items of `decode_turns.py`. Each norms and rotates the query heads of its item.
The last split of a sequence also rotates the new key, stores key and value, and attends to both
from registers: nothing that the launch stores is read back. The program that is the last to finish
a split of a kv head sums all of them, in the order of the splits. So the bits of a result do not
depend on the order of programs, on their number, or on the rest of the batch.

Programs without an item fetch the weights that the next kernels read into the L2 cache.
"""

from __future__ import annotations

from inspect import signature

import triton
import triton.language as tl

from engine.kernels.triton.attention_tiles import (
    attend_keys,
    before_keys,
    mean,
    query_heads,
    store_rows,
)
from engine.kernels.triton.decode_tail import attend_tail, newest_keys, tail_slots, turned
from engine.kernels.triton.decode_turns import (
    MAX_SPLITS,
    SPLIT,
    first_item,
    next_item,
    past_of,
    size_of,
    units_of,
)
from engine.kernels.triton.overlap import fetch_to_cache, wait_for_inputs

# Whether a loop can keep the addresses that it computes. Hoisted out of the loop over items, they
# take registers that then spill; Triton 3.4 hoists them.
CAN_KEEP: tl.constexpr = tl.constexpr("disable_licm" in signature(tl.range.__init__).parameters)
REDUCED: tl.constexpr = tl.constexpr(4096)  # numbers of a tile of the reduction
LINES: tl.constexpr = tl.constexpr(128)  # of the L2 cache, that a program fetches at a time
LINE_BITS: tl.constexpr = tl.constexpr(1024)


@triton.jit
def reduce_splits(
    sums, first, splits, SHARED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS
):
    """Sum the splits of the rows of `out` from `first` on, one row for each head that shares a key.

    All loads of a chunk of splits are under way at once. Most sequences have one chunk.
    """
    out, partial_out, partial_stats, max_splits, _ = sums
    CHUNK: tl.constexpr = REDUCED // (HEADS * DIMS) if HEADS * DIMS < REDUCED else 1
    head = tl.arange(0, HEADS)
    is_head = head < SHARED
    rows = (first + head) * max_splits
    split = tl.arange(0, MAX_SPLITS)
    stats = partial_stats + (rows[:, None] + split[None, :]) * 2
    is_read = is_head[:, None] & (split < splits)[None, :]
    highest = tl.load(stats, is_read, float("-inf"), cache_modifier=".cg")
    top = tl.where(is_head, tl.max(highest, 1), 0.0)[:, None]
    sums = tl.load(stats + 1, is_read, 0.0, cache_modifier=".cg")
    total = tl.sum(sums * tl.exp2(highest - top), 1)
    dims = tl.arange(0, DIMS)
    is_dim = (dims < HEAD_DIM)[None, None, :]
    result = tl.zeros([HEADS, DIMS], tl.float32)
    for begin in range(0, splits, CHUNK):
        number = begin + tl.arange(0, CHUNK)
        place = rows[:, None] + number[None, :]
        is_there = is_head[:, None] & (number < splits)[None, :]
        peak = tl.load(partial_stats + place * 2, is_there, float("-inf"), cache_modifier=".cg")
        weights = tl.exp2(peak - top)
        part = partial_out + place[:, :, None] * HEAD_DIM + dims[None, None, :]
        part = tl.load(part, is_there[:, :, None] & is_dim, 0.0, cache_modifier=".cg")
        result += tl.sum(part * weights[:, :, None], 1)
    store_rows(out, first + head, mean(result, total), is_head, HEAD_DIM)


@triton.jit
def finish(
    sums,
    place,  # (sequence, kv head)
    number,  # (split, splits)
    found,  # by `attend_keys`
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Store the result of a split. The last program to store one of a kv head sums them all."""
    out, partial_out, partial_stats, max_splits, counters = sums
    sequence, kv_head = place
    split, splits = number
    highest, total, result = found
    heads, real = query_heads(kv_head, tl.arange(0, ROWS), SHARED)
    first = sequence * (KV_HEADS * SHARED)
    if splits == 1:
        store_rows(out, first + heads, mean(result, total), real, HEAD_DIM)
    else:
        row = (first + heads) * max_splits + split
        store_rows(partial_out, row, result, real, HEAD_DIM)
        tl.store(partial_stats + row * 2, highest, mask=real)
        tl.store(partial_stats + row * 2 + 1, total, mask=real)
        tl.debug_barrier()  # the counter is raised after the stores of all threads
        counter = counters + sequence * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter, 0)
            first += kv_head * SHARED
            reduce_splits(sums, first, splits, SHARED, HEADS, HEAD_DIM, DIMS)


@triton.jit
def entries_of(table, begin, end, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load the entries of a block table for the keys [begin, end), as `attend_keys` takes them."""
    if BLOCKS is None:
        return None
    else:
        number = begin // BLOCK_SIZE + tl.arange(0, BLOCKS)
        return number, tl.load(table + number, number * BLOCK_SIZE < end, 0)


@triton.jit
def attend_item(sequence, item, projections, rotation, cache, sums, scores, sizes, turn, limits):
    """Compute one item; return the units of each kv head of its sequence. See `take_items`."""
    KV_HEADS: tl.constexpr = sizes[0]
    SHARED: tl.constexpr = sizes[1]
    HEADS: tl.constexpr = sizes[2]
    ROWS: tl.constexpr = HEADS if HEADS > 16 else 16  # tl.dot's smallest side
    HEAD_DIM: tl.constexpr = sizes[3]
    DIMS: tl.constexpr = sizes[4]
    BLOCK_SIZE: tl.constexpr = sizes[7]
    keys, values, tables, table_stride, _, lengths = cache
    sinks, scale = scores
    length = tl.load(lengths + sequence)
    first, past, origin = past_of(length, limits[1])
    units = units_of(length, limits[1])
    size, splits = size_of(units)
    kv_head, split = item // splits, item % splits
    begin = origin + split * size * SPLIT
    end = tl.minimum(begin + size * SPLIT, past)
    table = tables + sequence * table_stride
    loaded = entries_of(table, begin, end, sizes[6], BLOCK_SIZE)
    heads, real = query_heads(kv_head, tl.arange(0, ROWS), SHARED)
    q_rows = projections[0] + (sequence * projections[1] + heads * projections[2])[:, None]
    q = turned(q_rows, real, sequence, rotation[0], rotation, turn, HEAD_DIM, DIMS)
    q = q.to(projections[0].dtype.element_ty)
    rows = (tl.full([ROWS], 0, tl.int32) + (length - 1), heads)
    highest, total = before_keys(heads, sinks, split == 0, ROWS)
    out = tl.zeros([ROWS, DIMS], tl.float32)
    if split == splits - 1:
        found = tail_slots(sequence, length, cache, BLOCK_SIZE, limits[1])
        newest = newest_keys(found, kv_head, projections, rotation, cache, sizes, turn)
        state = (highest, total, out)
        highest, total, out = attend_tail(q, newest, found, state, rows, scale, limits[2])
    result = attend_keys(
        (q, None),
        (rows[0], rows[1], None),
        (keys, values, None, None),
        (table, kv_head * (BLOCK_SIZE * HEAD_DIM), KV_HEADS * (BLOCK_SIZE * HEAD_DIM), HEAD_DIM),
        (tl.maximum(begin, first), end),
        (None, None, False, scale),
        HEAD_DIM,
        HEAD_DIM,
        sizes[5],
        BLOCK_SIZE,
        limits[2],
        None,
        state=(highest, total, out),
        loaded=loaded,
    )
    place, number = (sequence, kv_head), (split, splits)
    finish(sums, place, number, result, KV_HEADS, SHARED, HEADS, ROWS, HEAD_DIM, DIMS)
    return units


@triton.jit
def fetch_lines(weight, lines, number, programs):
    """Fetch `lines` cache lines of a weight; this program is `number` of the `programs` that do."""
    if weight is not None:
        line = LINE_BITS // weight.dtype.element_ty.primitive_bitwidth  # elements of a line
        for first in range(number * LINES, lines, programs * LINES):
            numbers = tl.minimum(first + tl.arange(0, LINES), lines - 1)
            fetch_to_cache(weight + numbers.to(tl.int64) * line)


@triton.jit
def take_item(at, projections, rotation, cache, sums, scores, sizes, turn, limits):
    """Compute the item `at` (sequence, item, its first unit, end); return the next one's three."""
    sequence, item, unit, end = at
    if unit < end:
        row = sequence.to(tl.int64)
        units = attend_item(
            row, item, projections, rotation, cache, sums, scores, sizes, turn, limits
        )
        sequence, item, unit = next_item(sequence, item, unit, units, sizes[0])
    return sequence, item, unit


@triton.jit
def take_items(
    sequences,
    projections,  # (qk, its strides of a token and of a head, value, its two strides)
    rotation,  # (query_weight, key_weight, cos, sin, eps)
    cache,  # (keys, values, tables, table_stride, token_blocks, lengths)
    sums,  # (out, partial_out, partial_stats, max_splits, counters)
    scores,  # (sinks, scale)
    weights,  # (weight, lines, weight_after, lines_after)
    sizes,  # (KV_HEADS, SHARED, HEADS, HEAD_DIM, DIMS, TILE, BLOCKS, BLOCK_SIZE)
    turn,  # (NORM, OFFSET, PAIRS, WIDTH)
    limits,  # (SEQUENCES, WINDOW, SOFTCAP)
):
    """Compute the items of this program. If there are fewer than programs, the idle ones fetch."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    sequence, item, unit, end, all_units = first_item(
        cache[5], sequences, sizes[0], program, programs, limits[0], limits[1]
    )
    if (unit >= end) & (all_units < programs):
        fetch_lines(weights[0], weights[1], program - end, programs - all_units)
        fetch_lines(weights[2], weights[3], program - end, programs - all_units)
    if CAN_KEEP:
        for _ in tl.range(unit, end, disable_licm=True):
            sequence, item, unit = take_item(
                (sequence, item, unit, end),
                projections,
                rotation,
                cache,
                sums,
                scores,
                sizes,
                turn,
                limits,
            )
    else:
        for _ in range(unit, end):
            sequence, item, unit = take_item(
                (sequence, item, unit, end),
                projections,
                rotation,
                cache,
                sums,
                scores,
                sizes,
                turn,
                limits,
            )


@triton.jit(do_not_specialize=["sequences", "max_splits", "table_stride", "token_blocks"])
def fused_decode_kernel(
    out,  # [S, H, HEAD_DIM]
    partial_out,  # [S, H, max_splits, HEAD_DIM] fp32
    partial_stats,  # [S, H, max_splits, 2] fp32: highest score, sum of weights
    counters,  # [S, KV_HEADS] int32: finished splits; 0 before and after a launch
    qk,  # [S, H + KV_HEADS, HEAD_DIM], only the last dimension is contiguous
    value,  # [S, KV_HEADS, HEAD_DIM], the same
    query_weight,  # [HEAD_DIM] of the head norms, or None
    key_weight,
    cos,  # [S, WIDTH], or None
    sin,
    keys,  # [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    values,
    tables,  # [S, width] int64
    token_blocks,  # [S] int64
    lengths,  # [S] int32: number of keys, with the new one
    sinks,  # [H], or None
    weight,  # to fetch, or None
    weight_after,
    eps,
    scale,
    sequences,
    max_splits,
    qk_stride,
    qk_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    lines,  # of `weight`
    lines_after,
    SEQUENCES: tl.constexpr,  # `sequences`, rounded up to a power of two
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads of a kv head
    HEADS: tl.constexpr,  # SHARED, rounded up to a power of two
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # entries of the table that a split needs; None: read for each tile
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    take_items(
        sequences,
        (qk, qk_stride, qk_head_stride, value, value_stride, value_head_stride),
        (query_weight, key_weight, cos, sin, eps),
        (keys, values, tables, table_stride, token_blocks, lengths),
        (out, partial_out, partial_stats, max_splits, counters),
        (sinks, scale),
        (weight, lines, weight_after, lines_after),
        (KV_HEADS, SHARED, HEADS, HEAD_DIM, DIMS, TILE, BLOCKS, BLOCK_SIZE),
        (NORM, OFFSET, PAIRS, WIDTH),
        (SEQUENCES, WINDOW, SOFTCAP),
    )
