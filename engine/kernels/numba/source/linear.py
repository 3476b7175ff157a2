"""The product of rows with a weight that oneDNN has packed."""

from __future__ import annotations

from numba import njit

from engine.kernels.numba.call import CACHE_LINE, LinearCall
from engine.kernels.numba.source.multiply_panel import ALL, PREFETCH, multiply_panel
from engine.kernels.numba.source.panels import panels_kernel

PANEL_BYTES = 2**19  # at most, if two panels shall be in the L2 cache of a core
ROWS = 4  # that registers hold sums of, with the widest panels
LINES, HALF = 4, 2  # cache lines of a pair of inputs in the widest panels


@njit(inline="always")
def multiply_rows(call, panel, row, rows, width, biased, wide):
    """Multiply rows with a panel that is read once, and prefetched shortly before."""
    multiply_ahead(call, panel, row, PREFETCH, rows, width, ALL, biased, wide)


@njit(inline="always")
def multiply_ahead(call, panel, row, ahead, rows, width, lines, biased, wide):
    first_output = width * panel
    multiply_panel(
        weight=call.weight + 4 * first_output * call.pairs,
        ahead=ahead,
        bias=call.bias + 2 * first_output,
        pairs=call.pairs,
        split=call.split,
        x=call.x + call.x_bytes * row,
        x_bytes=call.x_bytes,
        out=call.out + call.out_bytes * row + (4 if wide else 2) * first_output,
        out_bytes=call.out_bytes,
        rows=rows,
        width=width,
        lines=lines,
        biased=biased,
        wide=wide,
    )


@njit(inline="always")
def multiply_fours(call, panel, row, end, width, biased, wide):
    """Multiply four rows at a time, and return the first row that is left.

    The panel is read several times, first from memory. Meanwhile the next one is prefetched, a part
    with each four rows.
    """
    passes = (end - row + ROWS - 1) // ROWS
    behind = 4 * width * call.pairs
    line = 0
    while end - row >= ROWS:
        ahead = behind + CACHE_LINE * line
        if passes < LINES:
            multiply_ahead(call, panel, row, ahead, ROWS, width, HALF, biased, wide)
            line = (line + HALF) % LINES
        else:
            multiply_ahead(call, panel, row, ahead, ROWS, width, 1, biased, wide)
            line = (line + 1) % LINES
        row += ROWS
    return row


@njit(inline="always")
def multiply_all_rows(call, panel, row, end, together, width, biased, wide):
    """Multiply up to `together` rows at a time, and at most 8. The counts must be literals."""
    if together == ROWS and end - row > ROWS and 4 * width * call.pairs <= PANEL_BYTES:
        row = multiply_fours(call, panel, row, end, width, biased, wide)
    while row < end:
        left = end - row
        if together >= 8 and left >= 8:
            multiply_rows(call, panel, row, 8, width, biased, wide)
            row += 8
        elif left >= 4:
            multiply_rows(call, panel, row, 4, width, biased, wide)
            row += 4
        elif left == 3:
            multiply_rows(call, panel, row, 3, width, biased, wide)
            row += 3
        elif left == 2:
            multiply_rows(call, panel, row, 2, width, biased, wide)
            row += 2
        else:
            multiply_rows(call, panel, row, 1, width, biased, wide)
            row += 1


def rows_kernel(width: int, biased: bool, wide: bool):
    """Return a kernel that multiplies as many rows at a time as registers can hold sums for.

    The products are fp32 if `wide`, else bf16.
    """
    together = 256 // width

    @njit(inline="always")
    def multiply(call, panel, row, end):
        multiply_all_rows(call, panel, row, end, together, width, biased, wide)

    return panels_kernel(multiply, LinearCall)
