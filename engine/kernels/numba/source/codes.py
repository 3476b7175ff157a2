"""The product of rows with quantised weights, and the rounding of rows before it."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import (
    CACHE_LINE,
    GROUP,
    LANES,
    OUTLIER,
    OUTLIER_FROM,
    SPAN,
    CodesCall,
    RoundCall,
)
from engine.kernels.numba.source.intrinsics import array_at, take, to_fp32
from engine.kernels.numba.source.multiply_codes import MOST_ROWS, multiply_codes
from engine.kernels.numba.source.panels import panels_kernel
from engine.kernels.numba.source.round_codes import (
    add_squares,
    largest_of_groups,
    lowest_bit,
    round_group,
)

MOST = np.float32(127)  # the largest code
OUTLIER_BYTES = OUTLIER.itemsize


@njit(inline="always")
def multiply_rows(call, panel, row, rows, bits, offsets, biased, wide):
    scale_bytes = (4 if offsets else 2) * LANES * call.groups
    multiply_codes(
        call.codes + (LANES * GROUP * bits // 8) * call.groups * panel,
        call.scales + scale_bytes * panel,
        call.bias + 2 * LANES * panel,
        call.groups,
        call.x + GROUP * call.groups * row,
        GROUP * call.groups,
        call.x_scales + 4 * call.spans * row,
        call.spans,
        call.x_sums + 4 * call.groups * row,
        call.num_outliers + 4 * row,
        call.outliers + OUTLIER_BYTES * call.most_outliers * row,
        call.most_outliers,
        call.out + call.out_bytes * row + (4 if wide else 2) * LANES * panel,
        call.out_bytes,
        rows,
        bits,
        offsets,
        biased,
        wide,
    )


def multiply_kernel(bits: int, offsets: bool, biased: bool, wide: bool):
    """Return the kernel that multiplies rows with weights of `bits` bits."""

    @njit(inline="always")
    def multiply(call, panel, row, end):
        while row < end:
            rows = min(end - row, MOST_ROWS)
            multiply_rows(call, panel, row, rows, bits, offsets, biased, wide)
            row += rows

    return panels_kernel(multiply, CodesCall)


@njit(inline="always")
def note_outlier(noted, index, number, bits, zero):
    """Write where the codes of an input are; 4 bits: the high halves have those of four more."""
    noted.codes = index // (32 // bits) * CACHE_LINE
    noted.shift = 8 * (index & 3) + (index & 4 if bits == 4 else 0)
    noted.scales = index // GROUP * (2 if zero else 4) * LANES
    noted.number = number


def round_kernel():
    """Return the kernel that rounds rows of bf16 to whole numbers of 8 bits, span by span.

    Outliers are left out, and listed with their numbers.
    """

    def round_rows(pointer):
        call = carray(pointer, 1)[0]
        scales = array_at(call.scales, (1,), np.float32)
        starts = array_at(call.sums, (1,), np.int32)
        sums = array_at(call.sums, (1,), np.float32)
        x = array_at(call.x, (1,), np.uint16)
        counts = array_at(call.num_outliers, (1,), np.int32)
        listed = array_at(call.outliers, (1,), OUTLIER)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                begin = row * call.x_stride
                address = call.x + 2 * begin
                codes = call.codes + GROUP * call.groups * row
                squares, poison = add_squares(address, call.groups)
                mean = squares / np.float32(GROUP * call.groups)
                limit = np.float32(OUTLIER_FROM) * np.sqrt(mean)
                found = row * call.most_outliers
                for span in range(call.spans):
                    groups = range(SPAN * span, min(SPAN * (span + 1), call.groups))
                    largest = largest_of_groups(address, groups.start, groups.stop, limit)
                    step = largest / MOST
                    scales[row * call.spans + span] = step + poison
                    factor = MOST / largest if largest else MOST
                    for group in groups:
                        total, outliers = round_group(address, codes, group, limit, factor)
                        summed = np.float32(total) * step
                        while outliers:
                            index = GROUP * group + lowest_bit(outliers)
                            number = to_fp32(x[begin + index])
                            note_outlier(listed[found], index, number, call.bits, call.zero)
                            summed += number
                            found += 1
                            outliers &= outliers - 1
                        place = row * call.groups + group
                        if call.zero:
                            starts[place] = -call.zero * total
                        else:
                            sums[place] = summed
                counts[row] = found - row * call.most_outliers

    return round_rows, RoundCall
