"""Draw from the logits that top-k, top-p and min-p keep, found by a search instead of a sort.

Top-k and top-p use the same search. It bisects the bits of the logits, which order like integers.
The threshold is the largest logit for which the weight of all logits at or above it reaches a
target. The weight is a count (target k) or a probability mass (target p). Of equal logits at the
threshold, the tokens with the lowest ids are kept.

The search reads only chunks that have a logit at or above the bound it tries. It starts from a
bound that the threshold cannot be below: most chunks of a large vocabulary are never read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.noise import log_noise

LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def order_of(logits):
    """Map fp32 to int32 of the same order, -0.0 like 0.0; on the bits it is its own inverse."""
    no_negative_zero = tl.where(logits == 0.0, 0.0, logits)
    bits = no_negative_zero.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(order):
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, tokens, size):
    return tl.load(row_ptr + tokens, tokens < size, float("-inf"))


@triton.jit
def _exp(logits, peak, temperature):
    """Return the weights of logits, relative to the weight of the highest logit, `peak`."""
    return tl.exp((logits - peak) / temperature)


@triton.jit
def highest(scores):
    """Return the highest score and its index, the lowest index of equal scores."""
    return tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def _next_chunk(tops, bound, after):
    """Return the first chunk behind `after` with a logit of at least order `bound`.

    `tops` is the order of each chunk's highest logit. Without such a chunk, the result is their
    number.
    """
    chunks = tl.arange(0, tops.shape[0])
    return tl.min(tl.where((tops >= bound) & (chunks > after), chunks, tops.shape[0]))


@triton.jit
def _survey(row, bound, CHUNK: tl.constexpr):
    """Split the logits at `bound`, an order, and return (count, mass, least, below).

    `row` is (row_ptr, size, temperature, peak, tops). `count`, `mass` and `least` describe the
    logits at or above `bound`. `mass` is the sum of exp((x - peak) / temperature), and `least` is
    their smallest order. `below` is the greatest order of the other logits.
    """
    row_ptr, size, temperature, peak, tops = row
    count = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    least = tl.full([CHUNK], HIGHEST, tl.int32)
    below = tl.full([CHUNK], LOWEST, tl.int32)
    chunk = _next_chunk(tops, bound, -1)
    while chunk < tops.shape[0]:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = tokens < size
        logits = load_logits(row_ptr, tokens, size)
        order = tl.where(is_token, order_of(logits), LOWEST)
        inside = (order >= bound) & is_token
        count += inside.to(tl.int32)
        weights = _exp(logits, peak, temperature)
        mass += tl.where(inside, weights, 0.0)
        least = tl.minimum(least, tl.where(inside, order, HIGHEST))
        below = tl.maximum(below, tl.where(inside, LOWEST, order))
        chunk = _next_chunk(tops, bound, chunk)
    unread = tl.max(tl.where(tops < bound, tops, LOWEST))
    return tl.sum(count), tl.sum(mass), tl.min(least), tl.maximum(tl.max(below), unread)


@triton.jit
def _low_by_count(tops, count):
    """Return an order that the highest logits of `count` chunks reach, or LOWEST."""
    low = tl.full([], LOWEST, tl.int64)
    high = tl.max(tops).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum((tops >= middle.to(tl.int32)).to(tl.int32)) >= count:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _low_by_mass(row, top_p):
    """Return an order such that the logits below it weigh less than 1 - top_p of all.

    Even if all `size` logits were below it, they would weigh half of that. The half is for
    rounding; where it is too small, the result is LOWEST.
    """
    _row_ptr, size, temperature, peak, _tops = row
    share = (1.0 - top_p) / (2.0 * size)
    low = order_of(peak + temperature * tl.log(share))
    return tl.where(top_p < 0.9999, low, LOWEST)


@triton.jit
def _threshold(row, target, low, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the greatest order, at least `low`, such that it and all above weigh `target`."""
    _row_ptr, _size, _temperature, peak, _tops = row
    low = low.to(tl.int64)
    high = order_of(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count, mass, least, below = _survey(row, middle.to(tl.int32), CHUNK)
        weight = mass if BY_MASS else count.to(tl.float32)
        if weight >= target:
            low = least.to(tl.int64)
            if weight == target:  # exact: any greater threshold would weigh less
                high = low + 1
        else:
            high = tl.maximum(below.to(tl.int64), low) + 1
    return low.to(tl.int32)


@triton.jit
def _equal_logits(row, limit, target, CHUNK: tl.constexpr):
    """Return how many logits equal to `limit` top-p adds to those above it to reach `target`."""
    _row_ptr, _size, temperature, peak, _tops = row
    _, mass, _, _ = _survey(row, limit + 1, CHUNK)
    weight = _exp(_logit(limit), peak, temperature)
    needed = (target - mass) / tl.maximum(weight, 1e-37)
    return tl.ceil(tl.minimum(needed, 1e9)).to(tl.int32)


@triton.jit
def _kept_logits(row, top_k, top_p, CHUNK: tl.constexpr):
    """Return the order of the smallest logit that top-k and top-p keep, and how many equal it."""
    _row_ptr, size, temperature, peak, tops = row
    has_top_k = (top_k > 0) & (top_k < size)
    limit = tl.full([], LOWEST, tl.int32)
    room = tl.full([], size, tl.int32)
    if has_top_k:
        low = _low_by_count(tops, top_k)
        limit = _threshold(row, top_k.to(tl.float32), low, False, CHUNK)
    if top_p < 1.0:
        count, mass, _, _ = _survey(row, limit + 1, CHUNK)
        if has_top_k:
            room = top_k - count
            mass += room * _exp(_logit(limit), peak, temperature)
        target = top_p * mass
        lower = limit
        low = tl.maximum(lower, _low_by_mass(row, top_p))
        limit = _threshold(row, target, low, True, CHUNK)
        reached = _equal_logits(row, limit, target, CHUNK)
        room = tl.where(limit == lower, tl.minimum(room, reached), reached)
        room = tl.maximum(room, 1)
    elif has_top_k:
        count, _, _, _ = _survey(row, limit + 1, CHUNK)
        room = top_k - count
    return limit, room


@triton.jit
def draw_filtered(row, top_k, top_p, min_p, key, CHUNK: tl.constexpr):
    row_ptr, size, temperature, peak, tops = row
    limit, room = _kept_logits(row, top_k, top_p, CHUNK)
    best = float("-inf")
    token = 0
    chunk = _next_chunk(tops, limit, -1)
    while chunk < tops.shape[0]:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = tokens < size
        logits = load_logits(row_ptr, tokens, size)
        order = tl.where(is_token, order_of(logits), LOWEST)
        equal = ((order == limit) & is_token).to(tl.int32)
        has_room = (equal > 0) & (tl.cumsum(equal, 0) <= room)
        is_likely = _exp(logits, peak, temperature) >= min_p
        is_kept = ((order > limit) | has_room) & is_likely
        room -= tl.sum(equal)
        if tl.max(is_kept.to(tl.int32)) > 0:
            scores = tl.div_rn(logits, temperature) - log_noise(key, tokens)
            scores = tl.where(is_kept, scores, float("-inf"))
            score, index = highest(scores)
            token = tl.where(score > best, chunk * CHUNK + index, token)
            best = tl.maximum(score, best)
        chunk = _next_chunk(tops, limit, chunk)
    return token
