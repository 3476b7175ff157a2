"""The cuts of the draw, without sorting.

The tokens that may stay are gathered: those above a bound that the cut cannot be below. Among them
the cut is searched by bisecting the order of scores. The threshold is the greatest score for which
the weight of all scores at or above it reaches a target: a count for top-k, a mass for top-p. Of
equal scores at the threshold, the tokens with the lowest ids stay.

A `row` is (address of the logits, their number, room): the addresses of scores, ids and weights.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.numba.call import LOG2_E
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.rowwise import SUMMING
from engine.kernels.numba.source.tops import (
    BLOCK,
    floats_at,
    highest_order,
    ids_at,
    number_of,
    order_of,
)

# Distances below the highest score, in nats: the mass above each is summed in one pass.
DEPTHS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 13.0)


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


@njit(inline="always")
def keep_likely(scores, ids, weights, min_p):
    """Move the tokens that weigh at least `min_p` to the front; return how many there are."""
    kept = 0
    for i in range(len(scores)):
        scores[kept] = scores[i]
        ids[kept] = ids[i]
        kept += 1 if weights[i] >= min_p else 0
    return kept
