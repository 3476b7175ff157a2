"""The loop over keys that decode and extend attention share: rows of queries, tiles of keys.

Softmax is computed with base 2 and in fp32. Products use the type of the inputs, without TF32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem

from engine.kernels.triton.kv_codes import KINDS, widened

MAX_HEAD_DIM = 512
MAX_REST = 128  # numbers of a key behind its value
MAX_HEADS = 16  # of a program, if values are parts of keys: more results would spill registers
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # tl.dot's smallest side
# Of keys and of values that are codes, [blocks, Hkv, block_size] fp32 each.
Scales = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Features:
    """How a layer computes its attention scores.

    `bias` [H, 2 * reach + 1] fp32 is added by distance (key - query), clamped to [-reach, reach].
    `sinks` [H] are scores that have no value.
    """

    scale: float
    window: int | None = None  # as in AttentionSpec
    softcap: float | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def bias_reach(self) -> int | None:
        return None if self.bias is None else self.bias.shape[1] // 2

    @property
    def arguments(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """The arguments of both kernels that these features set."""
        return self.bias, self.sinks, self.scale

    @property
    def constants(self) -> dict[str, float | None]:
        """The constants of both kernels that these features set."""
        return {"WINDOW": self.window, "SOFTCAP": self.softcap, "BIAS_REACH": self.bias_reach}


def as_loaded(
    keys: torch.Tensor, values: torch.Tensor | None, scales: Scales
) -> tuple[torch.Tensor | None, ...]:
    """Return keys, values and the scales of both, as kernels take them."""
    if scales is None:
        return keys, values, None, None
    kind = KINDS[keys.dtype]
    return keys.view(kind), None if values is None else values.view(kind), *scales


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a program's queries, keys and values, constants of both kernels.

    If values are parts of keys, programs compute the query heads of a kv head in parts.
    """

    dim: int
    value_dim: int
    shared: int  # query heads of a part
    parts: int

    @classmethod
    def of(
        cls, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor
    ) -> HeadShape:
        """Return the shape for the arguments of `decode_attention` and `extend_attention`."""
        shared = query.shape[1] // keys.shape[1]
        parts = 1
        if values is None:
            wanted = range(-(-shared // MAX_HEADS), shared)
            parts = next((count for count in wanted if shared % count == 0), shared)
        return cls(query.shape[2], out.shape[2], shared // parts, parts)

    @property
    def constants(self) -> dict[str, int]:
        rest = self.dim - self.value_dim
        return {
            "SHARED": self.shared,
            "PARTS": self.parts,
            "HEAD_DIM": self.dim,
            "VALUE_DIM": self.value_dim,
            "DIMS": padded(self.value_dim),
            "REST": padded(rest) if rest else 0,
        }


def padded(size: int) -> int:
    """Return the power of two that a tile needs for `size` rows or columns; at least MIN_DOT."""
    return max(MIN_DOT, triton.next_power_of_2(size))


def keys_per_tile(head_dim: int, dtype: torch.dtype, *, is_coded: bool = False) -> int:
    """Return the number of keys in a tile.

    It depends only on the arguments, so that no result depends on the rest of the batch.
    """
    elements = 8192 if dtype.itemsize == 2 else 2048
    if is_coded:  # codes are widened in registers
        elements //= 2
    return _fitting(head_dim, elements, 64)


def rows_per_tile(shared: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the rows of an extend tile: queries times the `shared` query heads of a kv head."""
    if dtype.itemsize == 2:
        elements = 16384
        most = 128
    else:
        elements = 2048
        most = 64
    if head_dim % 8:  # rows cannot be copied 16 bytes at a time: loads pass through registers
        elements //= 2
    rows = _fitting(head_dim, elements, most)
    return max(padded(shared), rows)


def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a program may use, or None without a GPU."""
    if device.type != "cuda":
        return None
    return int(max_shared_mem(device.index or 0))


def _fitting(head_dim: int, elements: int, most: int) -> int:
    """Return how many rows of `head_dim` fit in `elements`, at most `most`; more spill registers.

    Callers pass lower limits for fp32, which uses no tensor cores.
    """
    rows = elements // padded(head_dim)
    return min(max(rows, MIN_DOT), most)


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
def key_offsets(
    first,
    there,
    table,
    block_stride,
    key_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the offsets [TILE] int64 of the keys from `first` on.

    The block table is read only for keys that are `there`.
    """
    key = first + tl.arange(0, TILE)
    if BLOCK_SIZE is None:
        return key.to(tl.int64) * key_stride
    else:
        if TILE <= BLOCK_SIZE:
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
def visible_keys(key, there, positions, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which of the keys [TILE] the queries see, [ROWS, TILE] or [1, TILE]."""
    visible = there[None, :]
    if CAUSAL:
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
    rows,  # (positions, heads) of the queries, [ROWS] each
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
):
    """Return (highest score [ROWS], sum of weights [ROWS], weighted values [ROWS, DIMS]) in fp32.

    Tiles begin at multiples of TILE. Keys outside [begin, end) are not read, as they may be NaN.

    `cache` has what all heads and sequences share. Without `values`, they are the first VALUE_DIM
    numbers of keys, and read once. Only codes have scales. `own` is the offset of this kv head's
    key 0: that of block 0 if the keys are paged, else that of the sequence. `table` points to the
    sequence's block ids, int64. `bias` points to [heads, 2 * BIAS_REACH + 1] fp32, by distance; for
    `sinks` see `before_keys`.
    """
    query = queries[0]
    positions, heads = rows
    begin, end = span
    table, own, block_stride, key_stride = source
    keys, values, key_scales, value_scales = of_head(cache, own, HEAD_DIM)
    bias, sinks, counts, scale = features
    dims = tl.arange(0, query.shape[1])
    is_dim = dims < VALUE_DIM
    highest, total = before_keys(heads, sinks, counts, query.shape[0])
    out = tl.zeros(query.shape, tl.float32)
    origin = begin // TILE * TILE
    for first in range(origin, end, TILE):
        key = first + tl.arange(0, TILE)
        there = (key >= begin) & (key < end)
        offsets = key_offsets(first, there, table, block_stride, key_stride, TILE, BLOCK_SIZE)
        places = offsets[:, None] + dims[None, :]
        is_read = there[:, None] & is_dim[None, :]
        k = load_numbers(keys + places, is_read, query.dtype)
        scores = scores_of(queries, k, keys, offsets, there, HEAD_DIM, VALUE_DIM) * scale
        scores = scaled(scores, key_scales, offsets // HEAD_DIM, there)
        scores = shaped(scores, key, positions, heads, bias, SOFTCAP, BIAS_REACH)
        visible = visible_keys(key, there, positions, CAUSAL, WINDOW)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        weights, shrink, highest, total = to_weights(scores, highest, total)
        v = k
        if values is not None:
            v = load_numbers(values + places, is_read, query.dtype)
        weights = scaled(weights, value_scales, offsets // HEAD_DIM, there).to(v.dtype)
        out = tl.dot(weights, v, out * shrink[:, None], input_precision="ieee")
    return highest, total, out
