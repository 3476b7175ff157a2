"""Decode attention over a paged KV cache, split along the keys (Flash-Decoding).

One program reads one split of one sequence's keys for one kv head. The query heads that share this
kv head are the rows of its tile, or a part of them if values are parts of keys (see HeadShape). A
split has 256 keys, or a multiple of 256 if the sequence would otherwise need more than 32 splits.
Splits begin at multiples of 256.

The number of splits depends only on the sequence's own length, which the kernel reads on the
device. A sequence's result therefore has the same bits in every batch. The launch itself needs no
length, so a CUDA graph can capture it.

With one split, its program writes the result. With several splits, a second kernel sums the partial
results in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.attention_shapes import (
    Features,
    HeadShape,
    Scales,
    as_loaded,
    keys_per_tile,
    padded,
)
from engine.kernels.triton.attention_tiles import (
    attend_keys,
    load_queries,
    mean,
    query_heads,
    store_rows,
)
from engine.kernels.triton.overlap import launch_options, wait_for_inputs

SPLIT: tl.constexpr = tl.constexpr(256)
MAX_SPLITS: tl.constexpr = tl.constexpr(32)
# The target number of programs per launch, and the minimum per sequence and kv head. Programs
# without a split cost launch time; too few programs leave the device idle.
PROGRAMS, MIN_SPLIT_PROGRAMS = 4096, 4


@triton.jit
def splits_of(length, WINDOW: tl.constexpr):
    """Return (first visible key, start of the first split, keys per split, number of splits)."""
    first = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    origin = first // SPLIT * SPLIT
    pieces = tl.cdiv(length - origin, SPLIT)
    size = SPLIT * tl.maximum(tl.cdiv(pieces, MAX_SPLITS), 1)
    return first, origin, size, tl.maximum(tl.cdiv(length - origin, size), 1)


@triton.jit
def span_of(split, first, origin, size, length):
    """Return (begin, end) of a split's keys, from the results of `splits_of`."""
    begin = tl.maximum(origin + split * size, first)
    return begin, tl.minimum(origin + (split + 1) * size, length)


@triton.jit
def store_split(out, partial, place, number, values, real, VALUE_DIM: tl.constexpr):
    """Store the result of the only split in the rows `place` of `out`.

    Of several splits, store result, highest score and sum of weights, which the reduction combines.
    """
    split, splits = number
    highest, total, result = values
    if splits == 1:
        store_rows(out, place, mean(result, total), real, VALUE_DIM)
    else:
        partial_out, partial_stats, max_splits = partial
        place = place * max_splits + split
        store_rows(partial_out, place, result, real, VALUE_DIM)
        tl.store(partial_stats + place * 2, highest, mask=real)
        tl.store(partial_stats + place * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["tables", "lengths", "max_splits", "table_stride"])
def decode_kernel(
    out,  # [S, H, VALUE_DIM]
    partial_out,  # [S, H, max_splits, VALUE_DIM] fp32
    partial_stats,  # [S, H, max_splits, 2] fp32: highest score, sum of weights
    query,  # [S, H, D], only the last dimension is contiguous
    keys,  # [blocks, Hkv, BLOCK_SIZE, D]
    values,  # the same, or None: they are parts of keys
    key_scales,  # [blocks, Hkv, BLOCK_SIZE] fp32, if keys are codes
    value_scales,
    tables,  # [S, width] int64
    lengths,  # [S] int32: number of keys
    bias,
    sinks,  # [H], or None
    scale,
    max_splits,
    query_stride,
    head_stride,
    table_stride,
    SHARED: tl.constexpr,  # query heads of a part
    PARTS: tl.constexpr,  # of the query heads of one kv head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_REACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    kv_head, kv_heads = part // PARTS, parts // PARTS
    length = tl.load(lengths + sequence)
    first, origin, size, splits = splits_of(length, WINDOW)
    heads, real = query_heads(part, tl.arange(0, ROWS), SHARED)
    strides = (query_stride, head_stride)
    q = load_queries(query, sequence, heads, real, strides, HEAD_DIM, VALUE_DIM, DIMS, REST)
    own = kv_head * (BLOCK_SIZE * HEAD_DIM)
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        found = attend_keys(
            q,
            (tl.full([ROWS], 0, tl.int32) + (length - 1), heads, None),
            (keys, values, key_scales, value_scales),
            (tables + sequence * table_stride, own, kv_heads * (BLOCK_SIZE * HEAD_DIM), HEAD_DIM),
            span_of(split, first, origin, size, length),
            (bias, sinks, split == 0, scale),
            HEAD_DIM,
            VALUE_DIM,
            TILE,
            BLOCK_SIZE,
            SOFTCAP,
            BIAS_REACH,
        )
        place = sequence * (parts * SHARED) + heads
        partial = (partial_out, partial_stats, max_splits)
        store_split(out, partial, place, (split, splits), found, real, VALUE_DIM)


@triton.jit(do_not_specialize=["lengths", "max_splits"])
def reduce_kernel(
    out,  # [S, H, VALUE_DIM]
    partial_out,  # [S, H, max_splits, VALUE_DIM] fp32
    partial_stats,  # [S, H, max_splits, 2] fp32
    lengths,  # [S] int32
    max_splits,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the splits of one head of one sequence in order; do nothing if there is only one."""
    wait_for_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    _, _, _, splits = splits_of(tl.load(lengths + sequence), WINDOW)
    if splits == 1:
        return
    place = sequence * tl.num_programs(1) + tl.program_id(1)
    stats = partial_stats + place * max_splits * 2
    parts = partial_out + place * max_splits * VALUE_DIM
    split = tl.arange(0, MAX_SPLITS)
    highest = tl.max(tl.load(stats + split * 2, mask=split < splits, other=float("-inf")), 0)
    dims = tl.arange(0, DIMS)
    real = dims < VALUE_DIM
    total = 0.0
    result = tl.zeros([DIMS], tl.float32)
    for part in range(splits):
        weight = tl.exp2(tl.load(stats + part * 2) - highest)
        total += weight * tl.load(stats + part * 2 + 1)
        result += weight * tl.load(parts + part * VALUE_DIM + dims, mask=real, other=0.0)
    target = out + place * VALUE_DIM + dims
    tl.store(target, (result / total).to(out.dtype.element_ty), mask=real)


class DecodeTile(NamedTuple):
    """Keys read at a time, warps, and the compiler's stages. A tile in flight takes two stages."""

    keys: int
    warps: int
    stages: int


def decode_tile(
    head_dim: int, dtype: torch.dtype, *, is_coded: bool = False, has_rest: bool = False
) -> DecodeTile:
    """Return the tile of a program. It must not depend on the batch, as the bits depend on it.

    `head_dim` is that of values. If keys are longer, the tile `has_rest`.
    """
    is_wide, is_half = head_dim > 256, dtype.itemsize == 2
    warps, stages = 4, 5
    if (not is_half and head_dim > 64) or (is_coded and is_wide):
        warps = 8  # with four, registers spill
    if not is_half and is_wide:
        stages = 3  # shared memory is full
        if has_rest:
            warps = 16  # with eight, registers spill on sm_90
    return DecodeTile(keys_per_tile(head_dim, dtype, is_coded=is_coded), warps, stages)


def max_splits(keys: int, window: int | None) -> int:
    """Return the largest number of splits that a sequence of up to `keys` keys can have."""
    if window is not None:
        keys = min(keys, window + SPLIT.value - 1)  # the first split may begin before the window
    return min(-(-keys // SPLIT.value), MAX_SPLITS.value)


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    features: Features,
    scales: Scales = None,
) -> None:
    """Attend with `query` [S, H, D], each sequence's last token; write `out` [S, H, value_dim].

    `keys` and `values` are [blocks, Hkv, block_size, D]. Without `values`, they are the first
    value_dim numbers of keys. Row s of `tables` [S, width] int64 lists the blocks of sequence s,
    which has `lengths[s]` keys. With `scales`, keys and values are codes.
    """
    sequences, heads, _ = query.shape
    _, kv_heads, block_size, _ = keys.shape
    head = HeadShape.of(query, keys, values, out)
    dim = head.value_dim
    splits = max_splits(tables.shape[1] * block_size, features.window)
    shape = (sequences, heads, splits) if splits > 1 else (0, 0, 0)
    partial = [torch.empty(*shape, size, device=query.device) for size in (dim, 2)]  # fp32
    options = launch_options(query.device)
    tile = decode_tile(dim, query.dtype, is_coded=scales is not None, has_rest=head.dim > dim)
    parts = kv_heads * head.parts
    programs = max(MIN_SPLIT_PROGRAMS, PROGRAMS // (sequences * parts))
    decode_kernel[sequences, parts, min(splits, programs)](
        out,
        *partial,
        query,
        *as_loaded(keys, values, scales),
        tables,
        lengths,
        *features.arguments,
        splits,
        query.stride(0),
        query.stride(1),
        tables.stride(0),
        ROWS=padded(head.shared),
        TILE=tile.keys,
        BLOCK_SIZE=block_size,
        **head.constants,
        **features.constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if splits > 1:
        reduce_kernel[sequences, heads](
            out,
            *partial,
            lengths,
            splits,
            VALUE_DIM=dim,
            DIMS=padded(dim),
            WINDOW=features.window,
            num_warps=1 if dim <= 128 else 2,
            **options,
        )
