"""Attention for several new tokens per sequence: prefill chunks, encoder inputs, cross-attention.

One program computes a few neighbouring queries of one sequence for one kv head. The rows of its
tile are pairs (query, query head).

A program finds its sequence on the device: sequence s owns the tiles from
`query_starts[s] // queries + s` on. The launch therefore depends only on the number of tokens and
sequences. A token's result has the same bits in every batch, wherever its chunk begins and ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.attention_shapes import (
    Features,
    HeadShape,
    Scales,
    as_loaded,
    keys_per_tile,
    rows_per_tile,
    shared_memory,
)
from engine.kernels.triton.attention_tiles import (
    attend_keys,
    load_queries,
    mean,
    query_heads,
    store_rows,
)
from engine.kernels.triton.chips import features_of

# Shared memory for heads wider than 128 with five stages. An RTX 4090, L4 or A10 has only 99 KiB.
WIDE_BYTES = 102912


@triton.jit
def tile_of(REVERSED: tl.constexpr):
    """Return (tile, part of the heads) of this program.

    A GPU starts programs along the first axis of the grid before those along the second. The later
    tiles of a sequence see more keys. With REVERSED, the programs that start last have the fewest.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    if REVERSED:
        tiles, parts = tl.num_programs(0), tl.num_programs(1)
        turn = part * tiles + tile
        tile, part = tiles - 1 - turn // parts, turn % parts
    return tile, part


@triton.jit
def owner_of(query_starts, sequences, QUERIES: tl.constexpr, REVERSED: tl.constexpr):
    """Return (sequence, its first token, its queries, the tile's first query and end, the part).

    This program's tile belongs to the last sequence whose first tile does not come after it.
    """
    tile, part = tile_of(REVERSED)
    base = tl.load(query_starts)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_starts + middle) - base) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_starts + low)
    count = tl.load(query_starts + low + 1) - start
    first = (tile - (start - base) // QUERIES - low) * QUERIES
    return low, start, count, first, tl.minimum(first + QUERIES, count), part


@triton.jit
def tile_rows(
    first, start, count, part, SHARED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr
):
    """Return (query number within the sequence, token, query head, whether it exists) of each row.

    The sequence has `count` queries from the token `start` on.
    """
    rows = tl.arange(0, ROWS)
    packed: tl.constexpr = ROWS // QUERIES
    number = first + rows // packed
    heads, real = query_heads(part, rows % packed, SHARED)
    return number, (start + number).to(tl.int64), heads, (number < count) & real


@triton.jit
def visible_span(
    past, first, last, count, last_keys, start, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Return (begin, end) of the keys that queries [first, last) of `count` see.

    The sequence has `past` keys before its queries. The first of these is the token `start`.
    """
    begin = 0 if WINDOW is None else tl.maximum(past + first - WINDOW + 1, 0)
    if last_keys is not None:
        end = tl.load(last_keys + start + last - 1).to(tl.int32) + 1
    elif CAUSAL:
        end = past + last
    elif WINDOW is None:
        end = past + count
    else:
        end = past + tl.minimum(last + WINDOW - 1, count)
    return begin, end


@triton.jit
def last_keys_of(last_keys, tokens, real):
    """Return the last key that each row sees, of all tokens' `last_keys`, or None without them."""
    if last_keys is None:
        return None
    else:
        return tl.load(last_keys + tokens, mask=real, other=0).to(tl.int32)


@triton.jit
def head_offset(kv_head, start, key_head_stride, key_stride, BLOCK_SIZE: tl.constexpr):
    """Return the offset of a kv head's key 0: that of block 0, or of the sequence's first token."""
    offset = kv_head * key_head_stride
    if BLOCK_SIZE is None:
        offset += start.to(tl.int64) * key_stride
    return offset


@triton.jit
def store_means(out, tokens, heads, found, real, SHARED: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Store the results of `heads` [R] of `tokens` [R], `found` by `attend_keys`."""
    _, total, result = found
    place = tokens * (tl.num_programs(1) * SHARED) + heads
    store_rows(out, place, mean(result, total), real, VALUE_DIM)


@triton.jit
def table_of(tables, sequence, table_stride):
    """Return a sequence's row of the block tables, None if the keys are not paged."""
    if tables is None:
        return None
    else:
        return tables + sequence.to(tl.int64) * table_stride


@triton.jit(
    do_not_specialize=[
        "tables",
        "query_starts",
        "key_lengths",
        "last_keys",
        "sequences",
        "table_stride",
    ]
)
def extend_kernel(
    out,  # [T, H, VALUE_DIM]
    query,  # [T, H, D], only the last dimension is contiguous
    keys,  # [blocks, Hkv, BLOCK_SIZE, D], or the step's own [T, Hkv, D]
    values,  # the same, or None: they are parts of keys
    key_scales,  # [blocks, Hkv, BLOCK_SIZE] fp32, if keys are codes
    value_scales,
    tables,  # [S, width] int64, or None
    query_starts,  # [S + 1] int32
    key_lengths,  # [S] int32
    bias,
    sinks,  # [H], or None
    scale,
    last_keys,  # [T] int64: the last key that each token sees, or None: its own
    sequences,
    query_stride,
    head_stride,
    block_stride,
    key_head_stride,
    key_stride,
    table_stride,
    SHARED: tl.constexpr,  # query heads of a part
    PARTS: tl.constexpr,  # of the query heads of one kv head
    QUERIES: tl.constexpr,  # of a tile; a query has the rows SHARED, padded to a power of two
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_REACH: tl.constexpr,
    REVERSED: tl.constexpr,
):
    sequence, start, count, first, last, part = owner_of(query_starts, sequences, QUERIES, REVERSED)
    if first >= count:
        return
    number, tokens, heads, real = tile_rows(first, start, count, part, SHARED, QUERIES, ROWS)
    past, strides = tl.load(key_lengths + sequence) - count, (query_stride, head_stride)
    own = head_offset(part // PARTS, start, key_head_stride, key_stride, BLOCK_SIZE)
    found = attend_keys(
        load_queries(query, tokens, heads, real, strides, HEAD_DIM, VALUE_DIM, DIMS, REST),
        (past + number, heads, last_keys_of(last_keys, tokens, real)),
        (keys, values, key_scales, value_scales),
        (table_of(tables, sequence, table_stride), own, block_stride, key_stride),
        visible_span(past, first, last, count, last_keys, start, CAUSAL, WINDOW),
        (bias, sinks, True, scale),
        HEAD_DIM,
        VALUE_DIM,
        TILE,
        BLOCK_SIZE,
        SOFTCAP,
        BIAS_REACH,
        CAUSAL,
        WINDOW,
    )
    store_means(out, tokens, heads, found, real, SHARED, VALUE_DIM)


def _strides(keys: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides between blocks (0 if not paged), kv heads and keys."""
    if keys.ndim == 3:
        key, head, _ = keys.stride()
        return 0, head, key
    block, head, key, _ = keys.stride()
    return block, head, key


def extend_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    tables: torch.Tensor | None,
    query_starts: torch.Tensor,
    key_lengths: torch.Tensor,
    features: Features,
    *,
    causal: bool,
    scales: Scales = None,
    last_keys: torch.Tensor | None = None,
) -> None:
    """Attend with `query` [T, H, D], the new tokens of S sequences; write `out` [T, H, value_dim].

    Sequence s owns the tokens from query_starts[s] to query_starts[s + 1]; `query_starts` is
    [S + 1] int32. Tokens before query_starts[0] are not written.

    Sequence s has `key_lengths[s]` keys. Its row of `tables` [S, width] int64 lists their blocks in
    `keys` and `values` [blocks, Hkv, block_size, D]. Without tables, `keys` and `values` are
    [T, Hkv, D] and laid out like the queries. Without `values`, they are the first value_dim
    numbers of keys. With `causal`, a sequence's queries are its last positions. With `scales`, keys
    and values are codes. `last_keys` [T] int64 are those of StepLayout.
    """
    block_size = None if tables is None else keys.shape[2]
    if tables is None:
        assert values is not None
        if keys.stride() != values.stride() or keys.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
    head = HeadShape.of(query, keys, values, out)
    packed = triton.next_power_of_2(head.shared)
    rows = rows_per_tile(packed, head.value_dim, query.dtype)
    sequences = len(key_lengths)
    # The last tile of each sequence may be incomplete.
    extend_kernel[len(query) // (rows // packed) + sequences, keys.shape[1] * head.parts](
        out,
        query,
        *as_loaded(keys, values, scales),
        tables,
        query_starts,
        key_lengths,
        *features.arguments,
        last_keys,
        sequences,
        query.stride(0),
        query.stride(1),
        *_strides(keys),
        0 if tables is None else tables.stride(0),
        QUERIES=rows // packed,
        ROWS=rows,
        TILE=keys_per_tile(head.value_dim, query.dtype, is_coded=scales is not None),
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        REVERSED=features_of(query.device).longest_first,
        **head.constants,
        **features.constants,
        num_warps=8,
        num_stages=stages(head.value_dim, query.dtype, features, shared_memory(query.device)),
    )


def stages(head_dim: int, dtype: torch.dtype, features: Features, shared: int | None) -> int:
    """Return the number of pipeline stages for `shared` bytes of shared memory per program."""
    if features.bias is not None:
        return 2  # every further stage would also buffer tiles of the bias
    if head_dim > 256 and dtype.itemsize == 4:
        return 3
    if head_dim > 128 and shared is not None and shared < WIDE_BYTES:
        return 4
    return 5
