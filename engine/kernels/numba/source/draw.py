"""Draw the tokens of rows of logits. A thread takes one row at a time, and reads it few times.

Noise is computed exactly only for tokens that may win: few tokens have a draw that is small enough
for their probability. Blocks without such tokens are skipped. Cuts come before (`cuts.py`).
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import LOG2_E, DrawCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.cuts import (
    bound_by_count,
    bound_by_mass,
    fill,
    gather,
    keep_first,
    keep_likely,
    mass_of,
    masses_above,
    weigh,
)
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import array_at, on_stack, take
from engine.kernels.numba.source.noise import UNIT, log_noise, noise_bits, noise_key, second_key
from engine.kernels.numba.source.rowwise import SUMMING
from engine.kernels.numba.source.tops import (
    BLOCK,
    INFINITE,
    find_tops,
    first_equal,
    floats_at,
    ids_at,
    number_of,
)

# The logarithm of the smallest draw is above -22.2. No noise is greater than this.
MOST_NOISE = np.float32(22.2)


@njit(inline="always")
def may_win(score, bits, best, slack):
    """Whether score - log_noise(bits) may be above `best`: the draw is at least its uniform.

    `slack` covers rounding.
    """
    exponent = np.float32(LOG2_E) * (score - best + slack)
    exponent = np.float32(64) if exponent > np.float32(64) else exponent
    return np.float32(bits) * np.float32(UNIT) <= exp2(exponent)


@njit(fastmath=SUMMING, error_model="numpy")
def count_of_chances(scores, ids, key, second, best, slack):
    """Return how many tokens may win."""
    chances = np.float32(0)
    for i in range(len(scores)):
        bits = noise_bits(ids[i], key, second)
        chances += np.float32(1) if may_win(scores[i], bits, best, slack) else np.float32(0)
    return chances


@njit(fastmath=EXACT, error_model="numpy")
def race(room, count, key, best, token):
    """Return the greatest score plus noise of `count` tokens, and its token.

    `room` has the addresses of the scores and ids. `best` of `token` is the greatest one before.
    """
    second = second_key(key)
    slack = np.float32(1e-3) + np.float32(1e-6) * abs(best)
    for first in range(0, count, BLOCK):
        length = min(BLOCK, count - first)
        scores = floats_at(room[0], first, length)
        ids = ids_at(room[1], first, length)
        if not count_of_chances(scores, ids, key, second, best, slack):
            continue
        for i in range(length):
            bits = noise_bits(ids[i], key, second)
            if may_win(scores[i], bits, best, slack):
                total = scores[i] - log_noise(bits)
                if total > best or (total == best and ids[i] < token):
                    best = total
                    token = ids[i]
    return best, token


@njit(fastmath=EXACT, error_model="numpy")
def divide(logits, temperature, first, scores, ids):
    """Store the scores and the ids of logits that begin with token `first`."""
    for i in range(len(logits)):
        scores[i] = logits[i] / temperature
        ids[i] = first + i


@njit(fastmath=EXACT, error_model="numpy")
def draw_uncut(row, tops, temperature, key, start):
    """Draw among all tokens, first the most likely one, `start`."""
    address, size, room = row
    noise = log_noise(noise_bits(np.int32(start), key, second_key(key)))
    best = floats_at(address, 0, size)[start] / temperature - noise
    token = np.int32(start)
    for block in range(len(tops)):
        slack = np.float32(1e-3) + np.float32(1e-6) * abs(best)
        if tops[block] / temperature - best + MOST_NOISE + slack < 0:
            continue
        first = block * BLOCK
        count = min(BLOCK, size - first)
        logits = floats_at(address, first, count)
        divide(logits, temperature, first, floats_at(room[0], 0, count), ids_at(room[1], 0, count))
        best, token = race(room, count, key, best, token)
    return token


@njit(fastmath=EXACT, error_model="numpy")
def draw_cut(row, tops, temperature, cuts, key, peak):
    """Draw among the tokens that the cuts (top_k, top_p, min_p) keep. `peak`: the highest score."""
    address, size, room = row
    top_k, top_p, min_p = cuts
    has_top_k = 0 < top_k < size
    has_top_p = top_p < np.float32(1)
    mass = np.float32(0)
    bound = np.float32(-np.inf)
    if has_top_k:
        bound = bound_by_count(tops, temperature, top_k, floats_at(room[2], 0, len(tops)))
    elif has_top_p:
        mass, masses = masses_above(floats_at(address, 0, size), temperature, peak)
        bound = bound_by_mass(masses, top_p * mass, peak)
    if min_p > 0 and not (has_top_k and has_top_p):  # else top-p needs the mass of all top-k tokens
        least = peak + np.float32(math.log(min_p)) - np.float32(1e-3) - np.float32(1e-6) * abs(peak)
        bound = max(bound, least)
    count = gather(row, tops, temperature, bound)
    if has_top_k:
        fill(floats_at(room[2], 0, count))
        count = keep_first(room, count, np.float32(top_k))
    weigh(floats_at(room[0], 0, count), peak, floats_at(room[2], 0, count))
    if has_top_p:
        mass = mass_of(floats_at(room[2], 0, count)) if has_top_k else mass
        count = keep_first(room, count, top_p * mass)
    scores = floats_at(room[0], 0, count)
    ids = ids_at(room[1], 0, count)
    if min_p > 0:
        count = keep_likely(scores, ids, floats_at(room[2], 0, count), min_p)
    best = scores[0] - log_noise(noise_bits(ids[0], key, second_key(key)))
    _, token = race(room, count, key, best, ids[0])
    return token


@njit(inline="always")
def draw_row(row, tops, params, key, invalid):
    """Return the token of a row: the address of its logits, their number, and room to work in."""
    address, size, _ = row
    temperature, is_greedy, top_k, top_p, min_p = params
    highest = find_tops(address, size, tops)
    if highest == 0 or highest >= INFINITE:
        return invalid
    peak = number_of(highest)
    start = first_equal(floats_at(address, 0, size), tops, peak)
    if is_greedy:
        return np.int64(start)
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return np.int64(draw_uncut(row, tops, temperature, key, start))
    return np.int64(
        draw_cut(row, tops, temperature, (top_k, top_p, min_p), key, peak / temperature)
    )


def draw_kernel():
    """Return the kernel that draws rows it takes off the counter."""

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        size = call.size
        blocks = (size + BLOCK - 1) // BLOCK
        tops = array_at(on_stack(blocks), (blocks,), np.float32)
        row = take(call.counter)
        if row >= call.rows:
            return
        # A replay goes on counting. Its threads have different rooms, as their numbers are in line.
        begin = call.room + 12 * size * (take(call.slots) % call.rooms)
        room = begin, begin + 4 * size, begin + 8 * size  # scores, ids, weights
        temperatures = array_at(call.temperature, (1,), np.float32)
        top_ks = array_at(call.top_k, (1,), np.int32)
        top_ps = array_at(call.top_p, (1,), np.float32)
        min_ps = array_at(call.min_p, (1,), np.float32)
        seeds = array_at(call.seeds, (1,), np.int64)
        positions = array_at(call.positions, (1,), np.int64)
        tokens = array_at(call.tokens, (1,), np.int64)
        while row < call.rows:
            logits = call.logits + 4 * call.stride * row
            temperature = temperatures[row]
            is_greedy = temperature < np.float32(call.greedy_below)
            params = temperature, is_greedy, top_ks[row], top_ps[row], min_ps[row]
            key = noise_key(seeds[row], positions[row])
            tokens[row] = draw_row((logits, size, room), tops, params, key, call.invalid)
            row = take(call.counter)

    return over_rows, DrawCall
