"""The newest keys of a sequence in a decode step, which stores the last of them itself.

Its own new key, and those of tokens before it that are drafted in the same step, are normed and
rotated here, from the projections of their tokens. Keys of earlier steps come from the cache.
Queries use the same norm and rotation.

The last TAIL keys are one tile, from both sources. So a token has the same bits whether the tokens
before it were drafted in its own step or computed in earlier ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.attention_tiles import LOG2E, shaped, to_weights
from engine.kernels.triton.decode_turns import TAIL, past_of
from engine.kernels.triton.rotary import rotated


@triton.jit
def tail_slots(sequence, length, cache, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Return (positions, tokens, is_seen, is_new, blocks, offsets) of the newest keys, [TAIL] each.

    Blocks and offsets are the slots of the positions, and the last position is that of the
    sequence's own token. A key `is_new` if this launch stores it: then a token before the own one,
    which was drafted behind it, has this slot.
    """
    _, _, tables, table_stride, token_blocks, lengths = cache
    first, _, _ = past_of(length, WINDOW)
    row = tl.arange(0, TAIL)
    is_own = row == TAIL - 1
    position = length - TAIL + row
    is_seen = (position >= first) & (position >= 0)
    place = tl.maximum(position, 0)
    block = tl.load(tables + sequence * table_stride + place // BLOCK_SIZE, is_seen, 0)
    token = sequence - (TAIL - 1) + row
    is_token = token >= 0
    stored_block = tl.load(token_blocks + token, is_token, -1)
    stored_position = tl.load(lengths + token, is_token, 0) - 1
    is_same = (stored_block == block) & (stored_position == position)
    is_new = is_own | (is_same & is_seen & is_token)
    block = tl.where(is_own, stored_block, block)
    return position, token, is_seen, is_new, block, place % BLOCK_SIZE


@triton.jit
def turned(heads, real, tokens, weight, rotation, turn, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Norm and rotate the heads at the pointers `heads` [R, 1] that are `real` [R]; [R, DIMS].

    `tokens` is [R] or a scalar, `weight` that of the norm.
    """
    _, _, cos, sin, eps = rotation
    WIDTH: tl.constexpr = turn[3]
    row = (tokens + tl.zeros(real.shape, tl.int64))[:, None] * WIDTH
    angles = (cos, sin, row)
    return rotated(
        heads, real, weight, angles, eps, turn[0], turn[1], turn[2], HEAD_DIM, WIDTH, DIMS
    )


@triton.jit
def newest_keys(found, kv_head, projections, rotation, cache, sizes, turn):
    """Return the newest keys and values [TAIL, DIMS]; store those of the sequence's own token.

    `found` is by `tail_slots`. For the other arguments see `take_items` in fused_decode.py.
    """
    KV_HEADS: tl.constexpr = sizes[0]
    SHARED: tl.constexpr = sizes[1]
    HEAD_DIM: tl.constexpr = sizes[3]
    DIMS: tl.constexpr = sizes[4]
    BLOCK_SIZE: tl.constexpr = sizes[7]
    _, token, is_seen, is_new, block, offset = found
    qk, stride, head_stride, value, value_stride, value_head_stride = projections
    keys, values, _, _, _, _ = cache
    dims = tl.arange(0, DIMS)[None, :]
    is_dim = dims < HEAD_DIM
    k_head = KV_HEADS * SHARED + kv_head  # behind the query heads
    rows = qk + (token * stride + k_head * head_stride)[:, None]
    k_new = turned(rows, is_new, token, rotation[1], rotation, turn, HEAD_DIM, DIMS)
    rows = value + (token * value_stride + kv_head * value_head_stride)[:, None]
    v_new = tl.load(rows + dims, is_new[:, None] & is_dim, 0.0)
    slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + offset
    places = slot[:, None] * HEAD_DIM + dims
    is_read = (is_seen & (is_new == 0))[:, None] & is_dim
    k = tl.load(keys + places, is_read, 0.0)
    k = tl.where(is_new[:, None], k_new.to(k.dtype), k)
    v = tl.where(is_new[:, None], v_new, tl.load(values + places, is_read, 0.0))
    is_own = (tl.arange(0, TAIL) == TAIL - 1)[:, None] & is_dim
    tl.store(keys + places, k, is_own)
    tl.store(values + places, v, is_own)
    return k, v


@triton.jit
def attend_tail(query, newest, found, state, rows, scale, SOFTCAP: tl.constexpr):
    """Continue `state`, as in `attend_keys`, with the `newest` keys; `tail_slots` found them."""
    k, v = newest
    position, _, is_seen, _, _, _ = found
    highest, total, out = state
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    scores = shaped(scores, position, rows[0], rows[1], None, SOFTCAP, None)
    scores = tl.where(is_seen[None, :], scores * LOG2E, float("-inf"))
    weights, shrink, highest, total = to_weights(scores, highest, total)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return highest, total, out
