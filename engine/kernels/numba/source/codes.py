"""The product of rows with quantised weights, and the rounding of rows before it."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import GROUP, LANES, OUTLIER_FROM, CodesCall, RoundCall
from engine.kernels.numba.source.intrinsics import array_at, take, to_fp32
from engine.kernels.numba.source.multiply_codes import multiply_codes
from engine.kernels.numba.source.panels import panels_kernel
from engine.kernels.numba.source.round_codes import add_squares, lowest_bit, round_group


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
        call.x_scales + 4 * call.groups * row,
        call.x_sums + 4 * call.groups * row,
        call.num_outliers + 4 * row,
        call.outliers + 4 * call.most_outliers * row,
        call.outlier_numbers + 4 * call.most_outliers * row,
        call.most_outliers,
        call.out + call.out_bytes * row + (4 if wide else 2) * LANES * panel,
        call.out_bytes,
        rows,
        bits,
        offsets,
        biased,
        wide,
    )


@njit(inline="always")
def multiply_all_rows(call, panel, bits, offsets, biased, wide):
    """Multiply up to 8 rows at a time. The counts must be literals."""
    row = 0
    while row < call.rows:
        left = call.rows - row
        if left >= 8:
            multiply_rows(call, panel, row, 8, bits, offsets, biased, wide)
            row += 8
        elif left >= 4:
            multiply_rows(call, panel, row, 4, bits, offsets, biased, wide)
            row += 4
        elif left >= 2:
            multiply_rows(call, panel, row, 2, bits, offsets, biased, wide)
            row += 2
        else:
            multiply_rows(call, panel, row, 1, bits, offsets, biased, wide)
            row += 1


def multiply_kernel(bits: int, offsets: bool, biased: bool, wide: bool):
    """Return the kernel that multiplies rows with weights of `bits` bits."""

    @njit(inline="always")
    def multiply(call, panel):
        multiply_all_rows(call, panel, bits, offsets, biased, wide)

    return panels_kernel(multiply, CodesCall)


def round_kernel():
    """Return the kernel that rounds rows of bf16 to whole numbers of 8 bits, group by group.

    Outliers are left out, and listed with their numbers.
    """

    def round_rows(pointer):
        call = carray(pointer, 1)[0]
        scales = array_at(call.scales, (1,), np.float32)
        starts = array_at(call.sums, (1,), np.int32)
        sums = array_at(call.sums, (1,), np.float32)
        x = array_at(call.x, (1,), np.uint16)
        counts = array_at(call.num_outliers, (1,), np.int32)
        places = array_at(call.outliers, (1,), np.int32)
        numbers = array_at(call.outlier_numbers, (1,), np.float32)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                begin = row * call.x_stride
                squares, poison = add_squares(call.x + 2 * begin, call.groups)
                mean = squares / np.float32(GROUP * call.groups)
                limit = np.float32(OUTLIER_FROM) * np.sqrt(mean)
                found = row * call.most_outliers
                for group in range(call.groups):
                    largest, total, outliers = round_group(
                        call.x + 2 * begin, call.codes + GROUP * call.groups * row, group, limit
                    )
                    place = row * call.groups + group
                    scales[place] = largest / np.float32(127) + poison
                    if call.zero:
                        starts[place] = -call.zero * total
                    else:
                        sums[place] = np.float32(total) * scales[place]
                    while outliers:
                        index = GROUP * group + lowest_bit(outliers)
                        places[found] = index
                        numbers[found] = to_fp32(x[begin + index])
                        found += 1
                        outliers &= outliers - 1
                counts[row] = found - row * call.most_outliers

    return round_rows, RoundCall
