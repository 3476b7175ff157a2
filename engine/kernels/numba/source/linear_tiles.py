"""The product of any number of rows with a packed weight in tiles (AMX)."""

from __future__ import annotations

from numba import carray, njit

from engine.kernels.numba.call import LinearCall
from engine.kernels.numba.source.intrinsics import take
from engine.kernels.numba.source.multiply_tiles import multiply_tiles, outputs_together

ROWS = 16  # of a tile
CHUNK = 2**19  # bytes of rows that meet several panels: CPUs with AMX have 2 MB of L2 cache a core


@njit(inline="always")
def multiply_blocks(
    call, panel, row, blocks, last_rows, row_tiles, together, width, biased, wide, emulated
):
    for first in range(0, width, together):
        output = width * panel + first
        multiply_tiles(
            call.weight + 4 * (width * panel * call.pairs + first),
            call.bias + 2 * output,
            call.pairs,
            call.x + call.x_bytes * row,
            call.x_bytes,
            call.out + call.out_bytes * row + (4 if wide else 2) * output,
            call.out_bytes,
            blocks,
            last_rows,
            row_tiles,
            width,
            biased,
            wide,
            emulated,
        )


def tiles_kernel(width: int, biased: bool, wide: bool, emulated: bool):
    """Return a kernel that multiplies two tiles of rows at a time, and then the rows left.

    The products are fp32 if `wide`, else bf16. With `emulated`, no AMX instruction is used.
    """
    of_one, of_two = (outputs_together(row_tiles, width) for row_tiles in (1, 2))

    @njit(inline="always")
    def multiply_one(call, panel, row, rows):
        multiply_blocks(call, panel, row, 1, rows, 1, of_one, width, biased, wide, emulated)

    @njit(inline="always")
    def multiply_two(call, panel, row, blocks, last):
        multiply_blocks(call, panel, row, blocks, last, 2, of_two, width, biased, wide, emulated)

    @njit(inline="always")
    def multiply(call, panel, row, rows):
        blocks = rows // (2 * ROWS)
        if blocks > 0:
            multiply_two(call, panel, row, blocks, ROWS)
        row += 2 * ROWS * blocks
        left = rows - 2 * ROWS * blocks
        if left > ROWS:
            multiply_two(call, panel, row, 1, left - ROWS)
        elif left > 0:
            multiply_one(call, panel, row, left)

    def run(pointer):
        call = carray(pointer, 1)[0]
        blocks = max(1, CHUNK // (2 * ROWS * 4 * max(call.pairs, 1)))
        together = 2 * ROWS * blocks
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.panels:
                return
            for row in range(0, call.rows, together):
                for panel in range(first, min(first + call.at_once, call.panels)):
                    multiply(call, panel, row, min(together, call.rows - row))

    return run, LinearCall
