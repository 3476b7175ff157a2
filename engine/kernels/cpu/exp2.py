"""Powers of two, of which softmax and activations are made."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels.cpu.compile import EXACT


@njit(fastmath=EXACT, error_model="numpy")
def exp2(x):
    """2**x for x <= 0, within two units in the last place; 2**-126 for whatever is less.

    Arithmetic and no call, so it takes a vector at a time. The polynomial is that of degree 5 whose
    highest relative error between -1/2 and 1/2 is least.
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
