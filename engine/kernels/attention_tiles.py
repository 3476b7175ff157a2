"""What decode and extend attention share: rows of queries over a range of keys, tile by tile.

Softmax runs in the base of two and in fp32; products in the type of the inputs, without TF32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_HEAD_DIM = 256
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # tl.dot's smallest side


@dataclass(frozen=True, slots=True)
class Features:
    """What a layer asks of its scores.

    `bias` [H, 2 * reach + 1] fp32 is added by distance, key - query, clamped to its reach.
    """

    scale: float
    window: int | None = None  # visible keys including the query's own
    softcap: float | None = None
    bias: torch.Tensor | None = None

    @property
    def bias_reach(self) -> int | None:
        return None if self.bias is None else self.bias.shape[1] // 2


def padded(size: int) -> int:
    """The power of two that a tile needs for `size` rows or columns."""
    return max(MIN_DOT, triton.next_power_of_2(size))


def keys_per_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Of (head_dim, dtype) alone, so that no result depends on what shares a step."""
    return _fitting(head_dim, 8192 if dtype.itemsize == 2 else 2048, 64)


def rows_per_tile(shared: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries times the `shared` query heads of a kv head that one program extends."""
    elements, most = (16384, 128) if dtype.itemsize == 2 else (2048, 64)
    if head_dim % 8:  # too crooked to be copied 16 bytes at a time: all goes through registers
        elements //= 2
    return max(padded(shared), _fitting(head_dim, elements, most))


def _fitting(head_dim: int, elements: int, most: int) -> int:
    """Rows of `head_dim` within `elements`: beyond, registers spill. fp32 has no tensor cores."""
    return min(max(elements // padded(head_dim), MIN_DOT), most)


@triton.jit
def attend_keys(
    query,  # [ROWS, DIMS], zeros where padded
    positions,  # [ROWS] of the queries
    heads,  # [ROWS]
    keys,  # pointer to key 0 of this kv head: of block 0 if BLOCK_SIZE, else of the sequence
    values,
    table,  # pointer to this sequence's blocks, int64
    bias,  # pointer to [heads, 2 * BIAS_REACH + 1] fp32, by distance
    begin,
    end,
    scale,
    block_stride,
    key_stride,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens; None: keys lie one after another
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_REACH: tl.constexpr,
):
    """(highest score [ROWS], sum of weights [ROWS], weighted values [ROWS, DIMS]) in fp32.

    Tiles begin at multiples of TILE. Keys outside [begin, end) are not read: they may be NaN.
    """
    dims = tl.arange(0, DIMS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(begin // TILE * TILE, end, TILE):
        key = first + tl.arange(0, TILE)
        there = (key >= begin) & (key < end)
        if BLOCK_SIZE is None:
            offsets = key.to(tl.int64) * key_stride
        else:
            if TILE <= BLOCK_SIZE:
                block = tl.load(table + first // BLOCK_SIZE)
            else:
                block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
            offsets = block * block_stride + key % BLOCK_SIZE * key_stride
        offsets = offsets[:, None] + dims[None, :]
        read = there[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=read, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP is not None:  # tanh(|x|) = (1 - e) / (1 + e), e = exp(-2|x|)
            e = tl.exp2(tl.abs(scores) * (-2 / SOFTCAP * LOG2E))
            scores = tl.where(scores < 0, -SOFTCAP, SOFTCAP) * ((1 - e) / (1 + e))
        if BIAS_REACH is not None:
            distance = key[None, :] - positions[:, None]
            distance = tl.minimum(tl.maximum(distance, -BIAS_REACH), BIAS_REACH) + BIAS_REACH
            scores += tl.load(bias + heads[:, None] * (2 * BIAS_REACH + 1) + distance)
        visible = there[None, :]
        if CAUSAL:
            visible &= key[None, :] <= positions[:, None]
        if WINDOW is not None:
            visible &= key[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + offsets, mask=read, other=0.0)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, total, out
