"""The loop over keys that decode and extend attention share: rows of queries, tiles of keys.

Softmax is computed with base 2 and in fp32. Products use the type of the inputs, without TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.kv_codes import widened

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def query_heads(part, rows, SHARED: tl.constexpr):
    """Return (query head, whether it exists) for each of the `rows` of a part of the heads."""
    shared_head = tl.minimum(rows, SHARED - 1)
    head = part * SHARED + shared_head
    return head, rows < SHARED


@triton.jit
def load_queries(
    query,
    tokens,
    heads,
    real,
    strides,  # (between tokens, between heads)
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
):
    """Load the queries of `heads` [R] of a token, or of `tokens` [R].

    Returns their first VALUE_DIM numbers [R, DIMS], and the rest [R, REST] or None.
    """
    rows = query + (tokens * strides[0] + heads * strides[1])[:, None]
    first = load_rows(rows, real, VALUE_DIM, DIMS)
    if REST == 0:
        return first, None
    else:
        return first, load_rows(rows + VALUE_DIM, real, HEAD_DIM - VALUE_DIM, REST)


@triton.jit
def load_rows(rows, real, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Load [R, DIMS] from the pointers `rows` [R, 1]; zeros in the rows that are not `real` [R]."""
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    mask = real[:, None] & is_dim[None, :]
    return tl.load(rows + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(out, rows, values, real, HEAD_DIM: tl.constexpr):
    """Store `values` [R, DIMS] in the `rows` [R] of `out` [.., HEAD_DIM] that are `real` [R]."""
    dims = tl.arange(0, values.shape[1])
    is_dim = dims < HEAD_DIM
    mask = real[:, None] & is_dim[None, :]
    target = out + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mean(result, total):
    """Divide weighted values by the sum of weights; without keys (graph padding) return zeros."""
    return result / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def before_keys(heads, sinks, counts, ROWS: tl.constexpr):
    """Return (highest score [ROWS], sum of weights [ROWS]) before any key was seen.

    A sink that `counts` is like a key that was seen already, whose value is 0.
    """
    if sinks is None:
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    else:
        score = tl.load(sinks + heads).to(tl.float32) * LOG2E
        highest = tl.where(counts, score, float("-inf"))
        total = tl.where(counts, tl.full([ROWS], 1.0, tl.float32), 0.0)
    return highest, total


@triton.jit
def key_offsets(first, there, source, loaded, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offsets [TILE] int64 of the keys from `first` on; for `source` see `attend_keys`.

    The block table is read only for keys that are `there`, or not if its entries are `loaded`:
    (numbers, entries), [N] each. A tile is then within a block.
    """
    table, _, block_stride, key_stride = source
    key = first + tl.arange(0, TILE)
    if BLOCK_SIZE is None:
        return key.to(tl.int64) * key_stride
    else:
        if loaded is not None:
            numbers, entries = loaded
            block = tl.sum(tl.where(numbers == first // BLOCK_SIZE, entries, 0), 0)
        elif TILE <= BLOCK_SIZE:
            block = tl.load(table + first // BLOCK_SIZE)
        else:
            block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
        return block * block_stride + key % BLOCK_SIZE * key_stride


@triton.jit
def shaped(scores, key, positions, heads, bias, SOFTCAP: tl.constexpr, BIAS_REACH: tl.constexpr):
    """Apply the layer's softcap and its bias by distance to `scores` [ROWS, TILE]."""
    if SOFTCAP is not None:  # tanh(|x|) = (1 - e) / (1 + e), e = exp(-2|x|)
        e = tl.exp2(tl.abs(scores) * (-2 / SOFTCAP * LOG2E))
        signed_cap = tl.where(scores < 0, -SOFTCAP, SOFTCAP)
        scores = signed_cap * ((1 - e) / (1 + e))
    if BIAS_REACH is not None:
        distance = key[None, :] - positions[:, None]
        column = tl.minimum(tl.maximum(distance, -BIAS_REACH), BIAS_REACH) + BIAS_REACH
        width = 2 * BIAS_REACH + 1
        row = bias + heads[:, None] * width
        scores += tl.load(row + column)
    return scores


@triton.jit
def visible_keys(key, there, positions, last_keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which of the keys [TILE] the queries see, [ROWS, TILE] or [1, TILE]."""
    visible = there[None, :]
    if last_keys is not None:
        visible &= key[None, :] <= last_keys[:, None]
    elif CAUSAL:
        visible &= key[None, :] <= positions[:, None]
    if WINDOW is not None:
        visible &= key[None, :] > positions[:, None] - WINDOW
        if not CAUSAL:
            visible &= key[None, :] < positions[:, None] + WINDOW
    return visible


@triton.jit
def load_numbers(places, is_read, dtype: tl.constexpr):
    """Load keys or values, or the numbers of their codes; 0 where nothing is read."""
    if places.dtype.element_ty.is_int():
        return widened(tl.load(places, mask=is_read, other=0), dtype)
    else:
        return tl.load(places, mask=is_read, other=0.0)


@triton.jit
def scaled(numbers, scales, rows, there):
    """Multiply `numbers` [ROWS, TILE] by the scales of the keys in these `rows`, if there are any.

    Rows of codes are contiguous in the cache. So a row's number is also that of its scale.
    """
    if scales is None:
        return numbers
    else:
        return numbers * tl.load(scales + rows, mask=there, other=0.0)[None, :]


@triton.jit
def scores_of(queries, k, keys, offsets, there, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return the products [ROWS, TILE] of queries and keys, `k` being the keys' first numbers."""
    query, rest = queries
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    if rest is not None:
        dims = tl.arange(0, rest.shape[1])
        is_dim = dims < HEAD_DIM - VALUE_DIM
        places = offsets[:, None] + (VALUE_DIM + dims)[None, :]
        k_rest = load_numbers(keys + places, there[:, None] & is_dim[None, :], rest.dtype)
        scores = tl.dot(rest, tl.trans(k_rest), scores, input_precision="ieee")
    return scores


@triton.jit
def to_weights(scores, highest, total):
    """Return (weights [ROWS, TILE], factor of earlier sums, new highest score, new total)."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    # The maximum of a row without a visible key so far is -inf, and -inf - -inf would be NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(highest - finite)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def of_head(cache, own, HEAD_DIM: tl.constexpr):
    """Return the parts of `cache` from key 0 of a kv head on, which is `own` behind its first.

    Added to the offsets of a tile instead, `own` would take registers that then spill on sm_80.
    """
    keys, values, key_scales, value_scales = cache
    keys += own
    if values is not None:
        values += own
    if key_scales is not None:
        key_scales += own // HEAD_DIM
        value_scales += own // HEAD_DIM
    return keys, values, key_scales, value_scales


@triton.jit
def attend_keys(
    queries,  # (first numbers [ROWS, DIMS], rest [ROWS, REST] or None), zeros where padded
    rows,  # (positions, heads, last keys that they see or None: their own), [ROWS] each
    cache,  # (keys, values, key_scales, value_scales), see below
    source,  # (table, own, block_stride, key_stride), see below
    span,  # (begin, end) of the keys
    features,  # (bias, sinks, whether they count, scale), see below
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens; None: keys are not paged
    SOFTCAP: tl.constexpr,
    BIAS_REACH: tl.constexpr,
    CAUSAL: tl.constexpr = False,
    WINDOW: tl.constexpr = None,
    state=None,
    loaded=None,
):
    """Return (highest score [ROWS], sum of weights [ROWS], weighted values [ROWS, DIMS]) in fp32.

    Tiles begin at multiples of TILE. Keys outside [begin, end) are not read, as they may be NaN.

    `cache` has what all heads and sequences share. Without `values`, they are the first VALUE_DIM
    numbers of keys, and read once. Only codes have scales. `own` is the offset of this kv head's
    key 0: that of block 0 if the keys are paged, else that of the sequence. `table` points to the
    sequence's block ids, int64. `bias` points to [heads, 2 * BIAS_REACH + 1] fp32, by distance; for
    `sinks` see `before_keys`, for `loaded` `key_offsets`. A `state` is the result for other keys.
    """
    query = queries[0]
    positions, heads, last_keys = rows
    begin, end = span
    keys, values, key_scales, value_scales = of_head(cache, source[1], HEAD_DIM)
    bias, sinks, counts, scale = features
    dims = tl.arange(0, query.shape[1])
    is_dim = dims < VALUE_DIM
    if state is None:
        highest, total = before_keys(heads, sinks, counts, query.shape[0])
        out = tl.zeros(query.shape, tl.float32)
    else:
        highest, total, out = state
    origin = begin // TILE * TILE
    for first in range(origin, end, TILE):
        key = first + tl.arange(0, TILE)
        there = (key >= begin) & (key < end)
        offsets = key_offsets(first, there, source, loaded, TILE, BLOCK_SIZE)
        places = offsets[:, None] + dims[None, :]
        is_read = there[:, None] & is_dim[None, :]
        k = load_numbers(keys + places, is_read, query.dtype)
        scores = scores_of(queries, k, keys, offsets, there, HEAD_DIM, VALUE_DIM) * scale
        scores = scaled(scores, key_scales, offsets // HEAD_DIM, there)
        scores = shaped(scores, key, positions, heads, bias, SOFTCAP, BIAS_REACH)
        visible = visible_keys(key, there, positions, last_keys, CAUSAL, WINDOW)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        weights, shrink, highest, total = to_weights(scores, highest, total)
        v = k
        if values is not None:
            v = load_numbers(values + places, is_read, query.dtype)
        weights = scaled(weights, value_scales, offsets // HEAD_DIM, there).to(v.dtype)
        out = tl.dot(weights, v, out * shrink[:, None], input_precision="ieee")
    return highest, total, out
