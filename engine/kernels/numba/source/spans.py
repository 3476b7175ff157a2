"""Spans: neighbouring blocks of a sequence that a softmax takes together.

A span has as many blocks as hold SPAN_KEYS keys, and always the same blocks of its sequence. So the
bits of a token do not depend on the tokens that see a span together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.kernels.numba.call import ITEM_BYTES
from engine.kernels.numba.source.intrinsics import (
    array_at,
    copy_fp32,
    on_stack,
    write_addresses,
)
from engine.kernels.numba.source.sum_tiles import LANES

SPAN_KEYS = 64


class Span(NamedTuple):
    """Addresses of what is known about a span: of one kv head, with blocks in their order.

    Keys and values are tables of addresses, one for each LANES columns of a block's first row.
    Columns are keys of a transposed block, or numbers of values.
    """

    keys: int  # [vectors of a span's keys]
    values: int  # [blocks, vectors of a value]
    ahead_keys: int  # likewise: addresses from which as much is prefetched
    ahead_values: int
    key_scales: int  # [span_keys] fp32, if keys and values are codes
    value_scales: int  # likewise
    copies: int  # [block_size, value_dim]: values of one block, if they are parts of its keys


class Blocks(NamedTuple):
    """Blocks of a sequence, by their indexes, for one kv head."""

    sequence: int
    head: int
    begin: int
    end: int


@njit(inline="always")
def span_blocks(call):
    """Return the number of blocks of a span: one if values are parts of keys, as copies are big."""
    return max(1, SPAN_KEYS // call.block_size) if call.values else 1


@njit(inline="always")
def last_key(call, task, t):
    """Return the last key that the task's token `t` sees: its own, or the last of its image."""
    if call.last_keys:
        return array_at(call.last_keys + 8 * (task.first_token + t), (1,), np.int64)[0]
    return task.position + t


@njit(inline="always")
def value_vectors(call):
    return (call.value_dim + LANES - 1) // LANES


@njit(inline="always")
def span_on_stack(call, form):
    """Return room for what is known about a span."""
    blocks = span_blocks(call)
    keys = blocks * call.block_size
    scales = keys if ITEM_BYTES[form] == 1 else 0
    return Span(
        on_stack(2 * keys // LANES),
        on_stack(2 * blocks * value_vectors(call)),
        on_stack(2 * keys // LANES),
        on_stack(2 * blocks * value_vectors(call)),
        on_stack(scales),
        on_stack(scales),
        on_stack(0 if call.values else ITEM_BYTES[form] * call.block_size * call.value_dim // 4),
    )


@njit(inline="always")
def load_span(call, span, blocks, form):
    """Load the span of these blocks."""
    item = ITEM_BYTES[form]
    size = call.block_size
    vectors = value_vectors(call)
    table = array_at(call.tables + 8 * call.table_stride * blocks.sequence, (1,), np.int64)
    for b in range(blocks.end - blocks.begin):
        block = table[blocks.begin + b] * call.heads + blocks.head
        here = item * call.dim * size * block
        keys = span.keys + 8 * b * (size // LANES)
        write_addresses(keys, call.keys + here, size // LANES, item * LANES)
        values = call.values + here if call.values else span.copies
        write_addresses(span.values + 8 * b * vectors, values, vectors, item * LANES)
        if item == 1:
            copy_fp32(call.key_scales + 4 * size * block, span.key_scales + 4 * size * b, size)
            copy_fp32(call.value_scales + 4 * size * block, span.value_scales + 4 * size * b, size)


@njit(inline="always")
def look_ahead(call, span, blocks, form):
    """Let the span prefetch these blocks, at least one; if they are few, the last one is repeated.

    A row of a tile prefetches as many bytes as it computes with. Each vector's bytes lie together,
    because a row's part of a block may be less than a cache line.
    """
    item = ITEM_BYTES[form]
    size = call.block_size
    vectors = value_vectors(call)
    table = array_at(call.tables + 8 * call.table_stride * blocks.sequence, (1,), np.int64)
    for b in range(span_blocks(call)):
        index = min(blocks.begin + b, blocks.end - 1)
        here = item * call.dim * size * (table[index] * call.heads + blocks.head)
        keys = span.ahead_keys + 8 * b * (size // LANES)
        write_addresses(keys, call.keys + here, size // LANES, item * LANES * call.dim)
        values = call.values + here if call.values else call.keys + here
        write_addresses(span.ahead_values + 8 * b * vectors, values, vectors, item * LANES * size)
