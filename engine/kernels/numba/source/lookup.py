"""Lookup of the rows of a weight that is packed for products: a tied embedding has no other copy.

The numbers are those that were packed, bit by bit.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import GROUP, LANES, LookupCall
from engine.kernels.numba.source.intrinsics import array_at, take, to_element

EXPONENTS = np.float32(2.0**112)  # between the exponents of fp16 and of fp32
QUAD = 4  # inputs whose codes lie together


def panels_kernel():
    """Return the kernel for bf16 in panels (see `LinearCall`). It copies pairs of inputs."""

    def copy(pointer):
        call = carray(pointer, 1)[0]
        pairs = call.inputs // 2
        ids = array_at(call.ids, (1,), np.int64)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                panel = ids[row] // call.width
                place = panel * pairs * call.width + ids[row] % call.width
                found = array_at(call.weight + 4 * place, (pairs, call.width), np.int32)
                out = array_at(call.out + 4 * row * pairs, (pairs,), np.int32)
                for pair in range(pairs):
                    out[pair] = found[pair, 0]

    return copy, LookupCall


@njit(inline="always")
def half_to_fp32(bits):
    """Return the finite number with these bits of fp16."""
    magnitude = np.int32((bits & 0x7FFF) << 13).view(np.float32) * EXPONENTS
    return -magnitude if bits & 0x8000 else magnitude


def codes_kernel(bits: int, has_offsets: bool):
    """Return the kernel for codes in panels (see `CodesCall`), whose numbers it rounds to bf16."""
    group_bytes = LANES * GROUP * bits // 8
    parts = 2 if has_offsets else 1
    zero = np.float32(0 if has_offsets else 1 << bits - 1)

    def dequantize(pointer):
        call = carray(pointer, 1)[0]
        groups = call.inputs // GROUP
        ids = array_at(call.ids, (1,), np.int64)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                panel = ids[row] // LANES
                lane = ids[row] % LANES
                codes = array_at(
                    call.weight + panel * groups * group_bytes, (groups, group_bytes), np.uint8
                )
                scales = array_at(
                    call.scales + 2 * panel * groups * parts * LANES,
                    (groups, parts, LANES),
                    np.uint16,
                )
                out = array_at(call.out + 2 * row * call.inputs, (groups, GROUP), np.uint16)
                for group in range(groups):
                    scale = half_to_fp32(np.int32(scales[group, 0, lane]))
                    offset = np.float32(0)
                    if has_offsets:
                        offset = half_to_fp32(np.int32(scales[group, 1, lane]))
                    for place in range(GROUP):
                        quad = place // QUAD
                        if bits == 8:
                            code = codes[group, (quad * LANES + lane) * QUAD + place % QUAD]
                        else:  # two quads share each byte
                            both = codes[group, (quad // 2 * LANES + lane) * QUAD + place % QUAD]
                            code = both >> 4 if quad % 2 else both & 0xF
                        number = (np.float32(code) - zero) * scale + offset
                        out[group, place] = to_element(number, out)

    return dequantize, LookupCall
