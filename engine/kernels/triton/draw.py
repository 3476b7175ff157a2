"""Sample tokens without a sort, for greedy, sampled and filtered rows in one batch.

There are two launches. The first finds the best token of each chunk of the vocabulary, for rows
without filters: the most likely one, or the most likely one after adding noise. The second combines
the chunks. For a row with filters it searches for the smallest logit that is kept. It bisects the
bits of the logits, which order like integers.

Top-k and top-p use the same search. The threshold is the largest logit for which the weight of all
logits at or above it reaches a target. The weight is a count (target k) or a probability mass
(target p). Of equal logits at the threshold, the tokens with the lowest ids are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.noise import log_noise, noise_key

CHUNK = 2048  # tokens per program of the first launch
BLOCK = 4096  # tokens that a program of the second launch reads at a time; more spill registers
LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _order(x):
    """Map fp32 to int32 of the same order, -0.0 like 0.0; on the bits it is its own inverse."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _filtered(temperature, top_k, top_p, min_p, greedy_below):
    return (temperature >= greedy_below) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


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
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + at, at < size, float("-inf"))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32))
    place = row * tl.num_programs(1) + chunk
    tl.store(peak_ptr + place, tl.where(broken > 0, float("inf"), tl.max(x)))
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if not _filtered(temperature, top_k, top_p, tl.load(min_p_ptr + row), greedy_below):
        if temperature >= greedy_below:
            key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
            x = tl.div_rn(x, temperature) - log_noise(key, at)
        best, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_ptr + place, best)
        tl.store(token_ptr + place, chunk * CHUNK + index)


@triton.jit
def _survey(row_ptr, size, temperature, peak, bound, BLOCK: tl.constexpr):
    """Split the logits at `bound`, an order, and return (count, mass, least, below).

    `count`, `mass` and `least` describe the logits at or above `bound`. `mass` is the sum of
    exp((x - peak) / temperature), and `least` is their smallest order. `below` is the greatest
    order of the other logits.
    """
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], HIGHEST, tl.int32)
    below = tl.full([BLOCK], LOWEST, tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, at < size, float("-inf"))
        order = tl.where(at < size, _order(x), LOWEST)
        inside = (order >= bound) & (at < size)
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp((x - peak) / temperature), 0.0)
        least = tl.minimum(least, tl.where(inside, order, HIGHEST))
        below = tl.maximum(below, tl.where(inside, LOWEST, order))
    return tl.sum(count), tl.sum(mass), tl.min(least), tl.max(below)


@triton.jit
def _threshold(
    row_ptr, size, temperature, peak, target, low, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the greatest order, at least `low`, such that it and all above weigh `target`."""
    low = low.to(tl.int64)
    high = _order(peak).to(tl.int64) + 1
    while high - low > 1:
        bound = ((low + high) >> 1).to(tl.int32)
        count, mass, least, below = _survey(row_ptr, size, temperature, peak, bound, BLOCK)
        weight = mass if BY_MASS else count.to(tl.float32)
        if weight >= target:
            low = least.to(tl.int64)
            if weight == target:  # exact: any greater threshold would weigh less
                high = low + 1
        else:
            high = tl.maximum(below.to(tl.int64), low) + 1
    return low.to(tl.int32)


@triton.jit
def _draw_filtered(row_ptr, size, temperature, top_k, top_p, min_p, key, peak, BLOCK: tl.constexpr):
    limit = tl.full([], LOWEST, tl.int32)
    room = tl.full([], size, tl.int32)  # how many logits equal to the limit are kept
    if (top_k > 0) & (top_k < size):
        target = top_k.to(tl.float32)
        limit = _threshold(row_ptr, size, temperature, peak, target, limit, False, BLOCK)
    if top_p < 1.0:
        count, mass, _, _ = _survey(row_ptr, size, temperature, peak, limit + 1, BLOCK)
        if (top_k > 0) & (top_k < size):
            room = top_k - count
            mass += room * tl.exp((_logit(limit) - peak) / temperature)
        target = top_p * mass
        lower = limit
        limit = _threshold(row_ptr, size, temperature, peak, target, lower, True, BLOCK)
        _, mass, _, _ = _survey(row_ptr, size, temperature, peak, limit + 1, BLOCK)
        each = tl.maximum(tl.exp((_logit(limit) - peak) / temperature), 1e-37)
        reached = tl.ceil(tl.minimum((target - mass) / each, 1e9)).to(tl.int32)
        room = tl.maximum(tl.where(limit == lower, tl.minimum(room, reached), reached), 1)
    elif (top_k > 0) & (top_k < size):
        count, _, _, _ = _survey(row_ptr, size, temperature, peak, limit + 1, BLOCK)
        room = top_k - count
    best, token = float("-inf"), 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, at < size, float("-inf"))
        order = tl.where(at < size, _order(x), LOWEST)
        equal = ((order == limit) & (at < size)).to(tl.int32)
        stays = (order > limit) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        stays = stays & (tl.exp((x - peak) / temperature) >= min_p)
        room -= tl.sum(equal)
        if tl.max(stays.to(tl.int32)) > 0:
            score = tl.div_rn(x, temperature) - log_noise(key, at)
            score = tl.where(stays, score, float("-inf"))
            here, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(here > best, start + index, token)
            best = tl.maximum(here, best)
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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    places = row * chunks + at
    peak = tl.max(tl.load(peak_ptr + places, at < chunks, float("-inf")))
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if (peak == float("inf")) | (peak == float("-inf")):
        tl.store(out_ptr + row, tl.full([], invalid, tl.int64))
    elif _filtered(temperature, top_k, top_p, min_p, greedy_below):
        key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        row_ptr = logits_ptr + row * stride
        token = _draw_filtered(row_ptr, size, temperature, top_k, top_p, min_p, key, peak, BLOCK)
        tl.store(out_ptr + row, token.to(tl.int64))
    else:
        best = tl.load(best_ptr + places, at < chunks, float("-inf"))
        chunk = tl.argmax(best, 0, tie_break_left=True)
        tl.store(out_ptr + row, tl.load(token_ptr + row * chunks + chunk).to(tl.int64))


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
    block = min(BLOCK, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    device = logits.device
    best, peak = (torch.empty(rows, chunks, device=device) for _ in range(2))
    token = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    params = temperature, top_k, top_p, min_p, seeds, positions
    found = best, token, peak
    stride = logits.stride(0)
    if rows:
        _chunk_kernel[(rows, chunks)](
            logits, *params, *found, stride, size, greedy_below, CHUNK=chunk
        )
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
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )
    return out
