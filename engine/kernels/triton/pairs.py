"""Sums whose order the code states, so that it is the same in every tile.

`tl.sum` adds in an order that depends on the tile's shape and its warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_HALVINGS: tl.constexpr = tl.constexpr(12)


@triton.jit
def sum_in_pairs(x):
    """Return the sum [M] of x [N, M] over its first axis; N is a power of two up to 2^12.

    Neighbours are added, then neighbouring sums, and so on. The sums of parts of a power of two are
    therefore those on the way to the whole sum: its bits do not depend on the size of the parts.
    """
    for _ in tl.static_range(MAX_HALVINGS):
        if x.shape[0] > 1:
            pairs = tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]])
            first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = first + second
    return tl.reshape(x, [x.shape[1]])
