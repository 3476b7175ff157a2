"""Results of the tokens behind the last run of a step."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.numba.source.intrinsics import array_at, to_element


@njit(inline="always")
def write_padding(call, size, kind, item):
    """Let the rows of `size` elements in `out` be zero, for the tokens behind the last run."""
    first = array_at(call.starts, (1,), np.int64)[call.runs]
    numbers = array_at(call.out + item * size * first, ((call.tokens - first) * size,), kind)
    for i in range(len(numbers)):
        numbers[i] = to_element(np.float32(0), numbers)
