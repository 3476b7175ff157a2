"""The product of rows with quantised weights, and the rounding of rows before it."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import GROUP, LANES, CodesCall, RoundCall
from engine.kernels.numba.source.intrinsics import array_at, take, to_fp32
from engine.kernels.numba.source.multiply_codes import multiply_codes
from engine.kernels.numba.source.panels import panels_kernel

# A group has 15 bits if its largest input is above this many times the row's root mean square. Its
# other inputs would lose too much with 8 bits.
WIDE_FROM = 3.0


@njit(inline="always")
def multiply_rows(call, panel, row, rows, bits, offsets, biased, wide):
    scale_bytes = (4 if offsets else 2) * LANES * call.groups
    multiply_codes(
        call.codes + (LANES * GROUP * bits // 8) * call.groups * panel,
        call.scales + scale_bytes * panel,
        call.bias + 2 * LANES * panel,
        call.groups,
        call.x + GROUP * call.groups * row,
        call.x_low + GROUP * call.groups * row,
        GROUP * call.groups,
        call.x_scales + 4 * call.groups * row,
        call.x_sums + 4 * call.groups * row,
        call.x_is_wide + 4 * call.groups * row,
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


@njit(inline="always")
def mean_square(x, begin, count):
    total = np.float32(0)
    for index in range(count):
        number = to_fp32(x[begin + index])
        total += number * number
    return total / np.float32(count)


def round_kernel(is_bf16: bool):
    """Return the kernel that rounds groups of inputs to whole numbers of 8 or 15 bits.

    Each is written as two numbers of 8 bits: 128 * high + low. With 8 bits, low is 0.
    """
    element = np.uint16 if is_bf16 else np.float32
    wide_from = np.float32(WIDE_FROM * WIDE_FROM)

    def round_rows(pointer):
        call = carray(pointer, 1)[0]
        scales = array_at(call.scales, (1,), np.float32)
        starts = array_at(call.sums, (1,), np.int32)
        sums = array_at(call.sums, (1,), np.float32)
        is_wide = array_at(call.is_wide, (1,), np.int32)
        high = array_at(call.high, (1,), np.int8)
        low = array_at(call.low, (1,), np.int8)
        x = array_at(call.x, (1,), element)
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.rows:
                return
            for row in range(first, min(first + call.at_once, call.rows)):
                begin_row = row * call.x_stride
                limit = wide_from * mean_square(x, begin_row, GROUP * call.groups)
                for group in range(call.groups):
                    begin = begin_row + GROUP * group
                    largest = np.float32(0)
                    poison = np.float32(0)  # NaN if an input is NaN or infinite
                    for index in range(GROUP):
                        number = to_fp32(x[begin + index])
                        largest = max(largest, abs(number))
                        poison += number * np.float32(0)
                    place = row * call.groups + group
                    wide = largest * largest > limit
                    most = np.float32(127 * 128) if wide else np.float32(127)
                    is_wide[place] = np.int32(1) if wide else np.int32(0)
                    scale = largest / np.float32(127 * 128)
                    scales[place] = scale + poison
                    inverse = most / largest if largest > 0 else np.float32(0)
                    total = np.int32(0)
                    if wide:
                        for index in range(GROUP):
                            code = np.int32(np.rint(to_fp32(x[begin + index]) * inverse))
                            part = (code + 64) >> 7
                            high[GROUP * place + index] = part
                            low[GROUP * place + index] = code - (part << 7)
                            total += code
                    else:
                        for index in range(GROUP):
                            code = np.int32(np.rint(to_fp32(x[begin + index]) * inverse))
                            high[GROUP * place + index] = code
                            total += code << 7
                    if call.zero:
                        starts[place] = -call.zero * total
                    else:
                        sums[place] = np.float32(total) * scales[place]

    return round_rows, RoundCall
