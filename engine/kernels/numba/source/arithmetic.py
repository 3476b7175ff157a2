"""Operations on fp32 numbers at an address, such as the scores of a block of keys."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.numba.call import LOG2_E
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2
from engine.kernels.numba.source.intrinsics import array_at


@njit(inline="always")
def numbers_at(address, count):
    """Return the `count` fp32 numbers at this address."""
    return array_at(address, (count,), np.float32)


@njit(fastmath=EXACT, error_model="numpy")
def cap(address, count, softcap):
    """Compute softcap * tanh(score / softcap) for each score, in place."""
    scores = numbers_at(address, count)
    for k in range(count):
        x = scores[k] / softcap
        exponent = np.float32(-2 * LOG2_E) * abs(x)
        e = exp2(exponent)
        magnitude = (np.float32(1) - e) / (np.float32(1) + e)
        tanh = magnitude if x > 0 else -magnitude
        scores[k] = softcap * tanh


@njit(fastmath=EXACT, error_model="numpy")
def to_weights(address, count, top):
    """Replace each score by 2**(score - top).

    A hidden score becomes 2**-126, which is negligible next to 1.
    """
    scores = numbers_at(address, count)
    for k in range(count):
        scores[k] = exp2(scores[k] - top)


@njit(fastmath=EXACT, error_model="numpy")
def multiply(address, count, factors):
    """Multiply each number by its factor, in place; `factors` is an address, too."""
    numbers = numbers_at(address, count)
    others = numbers_at(factors, count)
    for k in range(count):
        numbers[k] *= others[k]


@njit(fastmath=EXACT, error_model="numpy")
def fill(address, begin, end, number):
    """Set the numbers [begin, end) at this address."""
    numbers = numbers_at(address + 4 * begin, end - begin)
    for k in range(end - begin):
        numbers[k] = number
