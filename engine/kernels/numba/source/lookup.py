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


def over_rows(look_up):
    """Return a kernel whose threads take some rows in turn.

    It calls `look_up(call, row, number)` for the output of this number. That is compiled by
    `njit(inline="always")`.
    """

    def run(pointer):
        call = carray(pointer, 1)[0]
        ids = array_at(call.ids, (1,), np.int64)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                look_up(call, row, ids[row])

    return run, LookupCall


def panels_kernel():
    """Return the kernel for bf16 in panels (see `LinearCall`). It copies pairs of inputs."""

    @njit(inline="always")
    def copy(call, row, number):
        pairs = call.inputs // 2
        place = number // call.width * pairs * call.width + number % call.width
        found = array_at(call.weight + 4 * place, (pairs, call.width), np.int32)
        out = array_at(call.out + 4 * row * pairs, (pairs,), np.int32)
        for pair in range(pairs):
            out[pair] = found[pair, 0]

    return over_rows(copy)


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

    @njit(inline="always")
    def dequantize(call, row, number):
        groups = call.inputs // GROUP
        panel = number // LANES
        lane = number % LANES
        place_of_codes = call.weight + panel * groups * group_bytes
        place_of_scales = call.scales + 2 * panel * groups * parts * LANES
        codes = array_at(place_of_codes, (groups, group_bytes), np.uint8)
        scales = array_at(place_of_scales, (groups, parts, LANES), np.uint16)
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
                out[group, place] = to_element((np.float32(code) - zero) * scale + offset, out)

    return over_rows(dequantize)
