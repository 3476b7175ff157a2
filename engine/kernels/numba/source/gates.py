"""Functions of a single number that gates are made of. They use arithmetic and no call."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.numba.call import LOG2_E
from engine.kernels.numba.compile import EXACT
from engine.kernels.numba.source.exp2 import exp2


@njit(fastmath=EXACT, error_model="numpy")
def exp(x):
    """Return e**x; 2**-126 below -87 and 2**126 above 87."""
    e = exp2(np.float32(-LOG2_E) * abs(x))
    return np.float32(1) / e if x > 0 else e


@njit(fastmath=EXACT, error_model="numpy")
def sigmoid(x):
    """Return 1 / (1 + e**-x)."""
    e = exp2(np.float32(-LOG2_E) * abs(x))
    numerator = np.float32(1) if x > 0 else e
    return numerator / (np.float32(1) + e)


@njit(fastmath=EXACT, error_model="numpy")
def softplus(x):
    """Return log(1 + e**x), within a few units in the last place.

    For e from 0 to 1, log(1 + e) is 2 artanh(s) with s = e / (2 + e), at most 1/3. The terms after
    the eighth are below a unit in the last place.
    """
    e = exp2(np.float32(-LOG2_E) * abs(x))
    s = e / (np.float32(2) + e)
    square = s * s
    y = np.float32(2 / 15)
    y = y * square + np.float32(2 / 13)
    y = y * square + np.float32(2 / 11)
    y = y * square + np.float32(2 / 9)
    y = y * square + np.float32(2 / 7)
    y = y * square + np.float32(2 / 5)
    y = y * square + np.float32(2 / 3)
    y = y * square + np.float32(2)
    return max(x, np.float32(0)) + y * s
