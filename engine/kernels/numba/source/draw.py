"""Draw the tokens of rows of logits. A thread takes one row at a time, and reads it few times.

The row is split into blocks, whose highest logits are kept. Noise is computed exactly only for
tokens that may win: few tokens have a draw that is small enough for their probability.

Cuts do not sort. The tokens that may stay are gathered: those above a bound that the cut cannot be
below. Among them the cut is searched by bisecting the order of scores. The threshold is the
greatest score for which the weight of all scores at or above it reaches a target: a count for
top-k, a mass for top-p. Of equal scores at the threshold, the tokens with the lowest ids stay.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import LOG2_E, DrawCall
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import array_at, on_stack, take
from engine.kernels.numba.source.noise import (
    UNIT,
    log_noise,
    noise_bits,
    noise_key,
    number_of,
    order_of,
    second_key,
)

# Sums over a row may be vectorized. Their order depends on the number of terms alone.
SUMMING = EXACT | {"reassoc"}
BLOCK = 256  # tokens
INFINITE = 0xFF000001  # the order of +inf
# The logarithm of the smallest draw is above -22.2. No noise is greater than this.
MOST_NOISE = np.float32(22.2)
# Distances below the highest score, in nats: the mass above each is summed in one pass.
DEPTHS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 13.0)


# Loops begin at 0: for any other first index the compiler checks whether it is negative, and does
# not vectorize. A part of a row therefore is an array of its own.


@njit(inline="always")
def floats_at(address, first, count):
    return array_at(address + 4 * first, (count,), np.float32)


@njit(inline="always")
def ids_at(address, first, count):
    return array_at(address + 4 * first, (count,), np.int32)


# ---- the highest logits ----------------------------------------------------------------------


@njit(fastmath=EXACT, error_model="numpy")
def highest_order(numbers):
    """Return the highest order of some numbers; 0 if there are none."""
    highest = np.uint32(0)
    for i in range(len(numbers)):
        order = order_of(numbers[i])
        highest = order if order > highest else highest
    return highest


@njit(inline="always")
def find_tops(address, size, tops):
    """Store the highest logit of each block, and return the order of the highest of all."""
    highest = np.uint32(0)
    for block in range(len(tops)):
        first = block * BLOCK
        top = highest_order(floats_at(address, first, min(BLOCK, size - first)))
        tops[block] = number_of(top)
        highest = top if top > highest else highest
    return highest


@njit(inline="always")
def first_equal(logits, tops, peak):
    """Return the index of the first logit that equals `peak`, the highest one."""
    block = 0
    while tops[block] != peak:
        block += 1
    token = block * BLOCK
    while logits[token] != peak:
        token += 1
    return token


# ---- the noise -------------------------------------------------------------------------------


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


# ---- the cuts --------------------------------------------------------------------------------


@njit(fastmath=SUMMING, error_model="numpy")
def survey(scores, weights, bound):
    """Split scores at `bound`, an order.

    Returns the weight of those at or above it, their least order, and the greatest of the others.
    """
    weight = np.float32(0)
    least = np.uint32(0xFFFFFFFF)
    below = np.uint32(0)
    for i in range(len(scores)):
        order = order_of(scores[i])
        inside = order >= bound
        weight += weights[i] if inside else np.float32(0)
        lower = order if inside else np.uint32(0xFFFFFFFF)
        least = lower if lower < least else least
        upper = np.uint32(0) if inside else order
        below = upper if upper > below else below
    return weight, least, below


@njit(fastmath=EXACT, error_model="numpy")
def threshold(scores, weights, target):
    """Return the greatest order such that the scores at or above it weigh `target`; else 0."""
    low = np.int64(0)
    high = np.int64(highest_order(scores)) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        weight, least, below = survey(scores, weights, np.uint32(middle))
        if weight >= target:
            low = np.int64(least)
            if weight == target:  # any greater threshold would weigh less
                high = low + 1
        else:
            high = max(np.int64(below), low) + 1
    return np.uint32(low)


@njit(fastmath=EXACT, error_model="numpy")
def keep(scores, ids, weights, target):
    """Move the tokens that reach `target` to the front, and return how many there are."""
    limit = threshold(scores, weights, target)
    above, _, _ = survey(scores, weights, np.uint32(limit + 1))
    # Of n equal scores with weight w, the first ones stay until `above` and they reach the target.
    missing = target - above
    kept = 0
    num_equal = 0
    for i in range(len(scores)):
        order = order_of(scores[i])
        stays = order > limit
        if order == limit:
            stays = num_equal == 0 or np.float32(num_equal) * weights[i] < missing
            num_equal += 1
        scores[kept] = scores[i]
        ids[kept] = ids[i]
        weights[kept] = weights[i]
        kept += 1 if stays else 0
    return kept


@njit(fastmath=SUMMING, error_model="numpy")
def mass_of(weights):
    mass = np.float32(0)
    for i in range(len(weights)):
        mass += weights[i]
    return mass


@njit(inline="always")
def weight_of(score, peak):
    """Return the likelihood of a score, relative to the highest one's."""
    return exp2(np.float32(LOG2_E) * (score - peak))


@njit(fastmath=EXACT, error_model="numpy")
def weigh(scores, peak, weights):
    for i in range(len(scores)):
        weights[i] = weight_of(scores[i], peak)


@njit(fastmath=SUMMING, error_model="numpy")
def masses_above(logits, temperature, peak):
    """Return the mass of all scores, and of those down to each of DEPTHS below `peak`."""
    mass = np.float32(0)
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = mass
    for i in range(len(logits)):
        score = logits[i] / temperature
        weight = weight_of(score, peak)
        depth = peak - score
        mass += weight
        m0 += weight if depth <= np.float32(DEPTHS[0]) else np.float32(0)
        m1 += weight if depth <= np.float32(DEPTHS[1]) else np.float32(0)
        m2 += weight if depth <= np.float32(DEPTHS[2]) else np.float32(0)
        m3 += weight if depth <= np.float32(DEPTHS[3]) else np.float32(0)
        m4 += weight if depth <= np.float32(DEPTHS[4]) else np.float32(0)
        m5 += weight if depth <= np.float32(DEPTHS[5]) else np.float32(0)
        m6 += weight if depth <= np.float32(DEPTHS[6]) else np.float32(0)
    return mass, (m0, m1, m2, m3, m4, m5, m6)


@njit(inline="always")
def bound_by_mass(masses, target, peak):
    """Return a score such that those at or above it surely weigh `target`."""
    for index in range(len(DEPTHS)):
        if masses[index] >= target * np.float32(1.0001):
            return peak - np.float32(DEPTHS[index])
    return np.float32(-np.inf)


@njit(inline="always")
def fill(ones):
    for i in range(len(ones)):
        ones[i] = np.float32(1)


@njit(inline="always")
def bound_by_count(tops, temperature, count, ones):
    """Return a score that the highest scores of `count` blocks reach."""
    if count > len(tops):
        return np.float32(-np.inf)
    fill(ones)
    return number_of(threshold(tops, ones, np.float32(count))) / temperature


@njit(fastmath=EXACT, error_model="numpy")
def gather_block(logits, temperature, bound, first, scores, ids, count):
    """Store the scores from `bound` on and their tokens behind `count` others; return the sum."""
    for i in range(len(logits)):
        score = logits[i] / temperature
        scores[count] = score
        ids[count] = first + i
        count += 1 if score >= bound and score > np.float32(-np.inf) else 0
    return count


@njit(inline="always")
def gather(row, tops, temperature, bound):
    """Store the scores from `bound` on and their tokens, and return how many there are."""
    address, size, room = row
    scores = floats_at(room[0], 0, size)
    ids = ids_at(room[1], 0, size)
    count = 0
    for block in range(len(tops)):
        if tops[block] / temperature >= bound:
            first = block * BLOCK
            logits = floats_at(address, first, min(BLOCK, size - first))
            count = gather_block(logits, temperature, bound, first, scores, ids, count)
    return count


@njit(inline="always")
def keep_first(room, count, target):
    """Keep those of `count` tokens in `room` that reach `target`; return how many there are."""
    scores = floats_at(room[0], 0, count)
    return keep(scores, ids_at(room[1], 0, count), floats_at(room[2], 0, count), target)


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
def keep_likely(scores, ids, weights, min_p):
    """Move the tokens that weigh at least `min_p` to the front; return how many there are."""
    kept = 0
    for i in range(len(scores)):
        scores[kept] = scores[i]
        ids[kept] = ids[i]
        kept += 1 if weights[i] >= min_p else 0
    return kept


# ---- the kernel ------------------------------------------------------------------------------


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
        begin = call.room + 12 * size * take(call.slots)
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
