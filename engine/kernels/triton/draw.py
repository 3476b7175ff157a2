"""Sample tokens without a sort, for greedy, sampled and filtered rows in one batch.

There are two launches. The first finds the highest logit of each chunk of the vocabulary. For rows
without filters it also finds the chunk's best token: the most likely one, or the most likely one
after adding noise. The second combines the chunks. For a row with filters it searches for the
smallest logit that is kept. It bisects the bits of the logits, which order like integers.

Top-k and top-p use the same search. The threshold is the largest logit for which the weight of all
logits at or above it reaches a target. The weight is a count (target k) or a probability mass
(target p). Of equal logits at the threshold, the tokens with the lowest ids are kept.

The search reads only chunks that have a logit at or above the bound it tries. It starts from a
bound that the threshold cannot be below: most chunks of a large vocabulary are never read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.noise import log_noise, noise_key

CHUNK = 2048  # tokens of a program of the first launch, and that the second reads at a time
LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _order(logits):
    """Map fp32 to int32 of the same order, -0.0 like 0.0; on the bits it is its own inverse."""
    no_negative_zero = tl.where(logits == 0.0, 0.0, logits)
    bits = no_negative_zero.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(order):
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
    is_sampled = temperature >= greedy_below
    has_filter = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return is_sampled & has_filter


@triton.jit
def _load_logits(row_ptr, tokens, size):
    return tl.load(row_ptr + tokens, tokens < size, float("-inf"))


@triton.jit
def _exp(logits, peak, temperature):
    """Return the weights of logits, relative to the weight of the highest logit, `peak`."""
    return tl.exp((logits - peak) / temperature)


@triton.jit
def _highest(scores):
    """Return the highest score and its index, the lowest index of equal scores."""
    return tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def _chunk_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ptr,
    peak_ptr,
    stride,
    size,
    greedy_below,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _load_logits(logits_ptr + row * stride, tokens, size)
    broken = (scores != scores) | (scores == float("inf"))
    is_broken = tl.max(broken.to(tl.int32)) > 0
    place = row * tl.num_programs(1) + chunk
    tl.store(peak_ptr + place, tl.where(is_broken, float("inf"), tl.max(scores)))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if not _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
        if temperature >= greedy_below:
            key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            scores = tl.div_rn(scores, temperature) - log_noise(key, tokens)
        best, index = _highest(scores)
        tl.store(best_ptr + place, best)
        tl.store(token_ptr + place, chunk * CHUNK + index)


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
        logits = _load_logits(row_ptr, tokens, size)
        order = tl.where(is_token, _order(logits), LOWEST)
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
    low = _order(peak + temperature * tl.log(share))
    return tl.where(top_p < 0.9999, low, LOWEST)


@triton.jit
def _threshold(row, target, low, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the greatest order, at least `low`, such that it and all above weigh `target`."""
    _row_ptr, _size, _temperature, peak, _tops = row
    low = low.to(tl.int64)
    high = _order(peak).to(tl.int64) + 1
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
def _draw_filtered(row, top_k, top_p, min_p, key, CHUNK: tl.constexpr):
    row_ptr, size, temperature, peak, tops = row
    limit, room = _kept_logits(row, top_k, top_p, CHUNK)
    best = float("-inf")
    token = 0
    chunk = _next_chunk(tops, limit, -1)
    while chunk < tops.shape[0]:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = tokens < size
        logits = _load_logits(row_ptr, tokens, size)
        order = tl.where(is_token, _order(logits), LOWEST)
        equal = ((order == limit) & is_token).to(tl.int32)
        has_room = (equal > 0) & (tl.cumsum(equal, 0) <= room)
        is_likely = _exp(logits, peak, temperature) >= min_p
        is_kept = ((order > limit) | has_room) & is_likely
        room -= tl.sum(equal)
        if tl.max(is_kept.to(tl.int32)) > 0:
            scores = tl.div_rn(logits, temperature) - log_noise(key, tokens)
            scores = tl.where(is_kept, scores, float("-inf"))
            score, index = _highest(scores)
            token = tl.where(score > best, chunk * CHUNK + index, token)
            best = tl.maximum(score, best)
        chunk = _next_chunk(tops, limit, chunk)
    return token


@triton.jit
def _pick_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ptr,
    peak_ptr,
    out_ptr,
    stride,
    size,
    chunks,
    greedy_below,
    invalid,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    places = row * chunks + chunk
    peaks = tl.load(peak_ptr + places, is_chunk, float("-inf"))
    peak = tl.max(peaks)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(out_ptr + row, tl.full([], invalid, tl.int64))
    elif _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
        key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        tops = tl.where(is_chunk, _order(peaks), LOWEST)
        filtered = (logits_ptr + row * stride, size, temperature, peak, tops)
        token = _draw_filtered(filtered, top_k, top_p, min_p, key, CHUNK)
        tl.store(out_ptr + row, token.to(tl.int64))
    else:
        scores = tl.load(best_ptr + places, is_chunk, float("-inf"))
        best = tl.argmax(scores, 0, tie_break_left=True)
        token = tl.load(token_ptr + row * chunks + best)
        tl.store(out_ptr + row, token.to(tl.int64))


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy_below: float,
    invalid: int,
) -> torch.Tensor:
    """Return tokens [R] int64 for fp32 logits [R, V], as `engine.sampling.draw` defines them.

    Each row of logits must be contiguous; the stride between rows is free. The parameters are
    dense.
    """
    rows, size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    chunk = min(CHUNK, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    device = logits.device
    best = torch.empty(rows, chunks, device=device)
    peak = torch.empty(rows, chunks, device=device)
    token = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    params = (temperature, top_k, top_p, min_p, seeds, positions)
    found = (best, token, peak)
    stride = logits.stride(0)
    _chunk_kernel[(rows, chunks)](logits, *params, *found, stride, size, greedy_below, CHUNK=chunk)
    _pick_kernel[(rows,)](
        logits,
        *params,
        *found,
        out,
        stride,
        size,
        chunks,
        greedy_below,
        invalid,
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=chunk,
        num_warps=max(chunk // 256, 1),
    )
    return out
