"""Powers of two, from which softmax and activations are computed."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.numba.compile import EXACT


@njit(fastmath=EXACT, error_model="numpy")
def exp2(x):
    """Return 2**x for x <= 0, within two units in the last place; 2**-126 if x is below -126.

    It uses arithmetic and no call, so that loops over it vectorize. The polynomial is the one of
    degree 5 with the smallest maximum relative error between -1/2 and 1/2.
    """
    x = np.float32(-126) if x < np.float32(-126) else x
    n = np.floor(x + np.float32(0.5))
    x = x - n
    y = np.float32(0.00132647273)
    y = y * x + np.float32(0.00967151299)
    y = y * x + np.float32(0.0555073358)
    y = y * x + np.float32(0.240222424)
    y = y * x + np.float32(0.693147004)
    y = y * x + np.float32(1)
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
