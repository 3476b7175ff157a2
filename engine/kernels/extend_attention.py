"""Attention of several new tokens a sequence: chunks on a prefix, texts, answers to a source.

One program computes some neighbouring queries of one sequence for one kv head: rows are (query,
query head). Which sequence a program belongs to it finds on the device: sequence s owns the tiles
from `query_starts[s] // queries + s` on, so the launch knows the number of tokens only. A token's
result has the same bits whatever shares its step and wherever its chunk begins and ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tiles import (
    Features,
    attend_keys,
    keys_per_tile,
    padded,
    rows_per_tile,
)


@triton.jit
def owner_of(tile, query_starts, sequences, QUERIES: tl.constexpr):
    """(sequence, its tile number) of the launch's tile: the last that owns one so early."""
    base = tl.load(query_starts)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_starts + middle) - base) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_starts + low) - base) // QUERIES - low


@triton.jit(
    do_not_specialize=["tables", "query_starts", "key_lengths", "sequences", "table_stride"]
)
def extend_kernel(
    out,  # [T, H, D]
    query,  # [T, H, D], any stride but the last
    keys,  # [blocks, Hkv, BLOCK_SIZE, D], or the step's own [T, Hkv, D]
    values,
    tables,  # [S, width] int64, or None
    query_starts,  # [S + 1] int32
    key_lengths,  # [S] int32
    bias,
    scale,
    sequences,
    query_stride,
    head_stride,
    block_stride,
    key_head_stride,
    key_stride,
    table_stride,
    SHARED: tl.constexpr,  # query heads of one kv head
    PACKED: tl.constexpr,  # as many rows are a query's: SHARED, padded to a power of two
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_REACH: tl.constexpr,
):
    queries: tl.constexpr = ROWS // PACKED
    kv_head = tl.program_id(1)
    sequence, tile = owner_of(tl.program_id(0), query_starts, sequences, queries)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    first = tile * queries
    if first >= count:
        return
    length = tl.load(key_lengths + sequence)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    number = first + rows // PACKED  # of the query among the sequence's new ones
    positions = length - count + number
    heads = kv_head * SHARED + tl.minimum(rows % PACKED, SHARED - 1)
    real = (number < count) & (rows % PACKED < SHARED)
    real = real[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (start + number).to(tl.int64)
    begin = 0
    end = length
    if CAUSAL:
        end = length - count + tl.minimum(first + queries, count)
    if WINDOW is not None:
        begin = tl.maximum(length - count + first - WINDOW + 1, 0)
    keys += kv_head * key_head_stride
    values += kv_head * key_head_stride
    table = tables
    if BLOCK_SIZE is None:
        keys += start.to(tl.int64) * key_stride
        values += start.to(tl.int64) * key_stride
    else:
        table += sequence.to(tl.int64) * table_stride
    query += tokens[:, None] * query_stride + heads[:, None] * head_stride
    _, total, result = attend_keys(
        tl.load(query + dims[None, :], mask=real, other=0.0),
        positions,
        heads,
        keys,
        values,
        table,
        bias,
        begin,
        end,
        scale,
        block_stride,
        key_stride,
        HEAD_DIM,
        ROWS,
        DIMS,
        TILE,
        BLOCK_SIZE,
        CAUSAL,
        WINDOW,
        SOFTCAP,
        BIAS_REACH,
    )
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    out += (tokens[:, None] * (tl.num_programs(1) * SHARED) + heads[:, None]) * HEAD_DIM
    tl.store(out + dims[None, :], result.to(out.dtype.element_ty), mask=real)


def extend_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    query_starts: torch.Tensor,
    key_lengths: torch.Tensor,
    features: Features,
    *,
    causal: bool,
) -> None:
    """Write `out` [T, H, D] of `query` [T, H, D], the tokens of S sequences one after another.

    Those of sequence s are query_starts[s] to query_starts[s + 1], [S + 1] int32; tokens before the
    first are left alone. It has `key_lengths[s]` keys, to which its blocks in `tables` [S, width]
    int64 lead, in keys and values [blocks, Hkv, block_size, D]; without tables they lie like the
    queries, [T, Hkv, D]. A causal sequence's queries are its last positions.
    """
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if tables is None:
        if keys.stride() != values.stride() or keys.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        block_size, block_stride, (key_stride, key_head_stride, _) = None, 0, keys.stride()
    else:
        block_size = keys.shape[2]
        block_stride, key_head_stride, key_stride, _ = keys.stride()
    packed = triton.next_power_of_2(heads // kv_heads)
    rows = rows_per_tile(packed, dim, query.dtype)
    sequences = len(key_lengths)
    # Each sequence may leave its last tile incomplete.
    extend_kernel[tokens // (rows // packed) + sequences, kv_heads](
        out,
        query,
        keys,
        values,
        tables,
        query_starts,
        key_lengths,
        features.bias,
        features.scale,
        sequences,
        query.stride(0),
        query.stride(1),
        block_stride,
        key_head_stride,
        key_stride,
        0 if tables is None else tables.stride(0),
        SHARED=heads // kv_heads,
        PACKED=packed,
        HEAD_DIM=dim,
        ROWS=rows,
        DIMS=padded(dim),
        TILE=keys_per_tile(dim, query.dtype),
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        WINDOW=features.window,
        SOFTCAP=features.softcap,
        BIAS_REACH=features.bias_reach,
        num_warps=8,
        num_stages=5 if features.bias is None else 2,  # the bias's tiles would be buffered, too
    )
