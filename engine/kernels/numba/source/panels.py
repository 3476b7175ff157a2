"""The loop of the kernels that multiply rows with the panels of a weight."""

from __future__ import annotations

from numba import carray

from engine.kernels.numba.source.intrinsics import take

ROWS_AT_ONCE = 64  # that a thread takes; with few panels, threads would else end far apart


def panels_kernel(multiply, call_type):
    """Return a kernel whose threads take some panels, and some of the rows, in turn.

    They call `multiply(call, panel, row, end)` for the rows [row, end). It is compiled by
    `njit(inline="always")`.
    """

    def run(pointer):
        call = carray(pointer, 1)[0]
        parts = max(1, (call.rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        while True:
            number = take(call.counter)
            first = number // parts * call.at_once
            if first >= call.panels:
                return
            row = number % parts * ROWS_AT_ONCE
            end = min(row + ROWS_AT_ONCE, call.rows)
            for panel in range(first, min(first + call.at_once, call.panels)):
                multiply(call, panel, row, end)

    return run, call_type
