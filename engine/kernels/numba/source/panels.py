"""The loop of the kernels that multiply rows with the panels of a weight."""

from __future__ import annotations

from numba import carray

from engine.kernels.numba.source.intrinsics import take

ROWS_AT_ONCE = 64  # that a thread takes; with few panels, threads would else end far apart


def panels_kernel(multiply, call_type):
    """Return a kernel whose threads take some panels, and some of the rows, in turn.

    With few rows each thread takes neighbouring panels, so that its reads go on without a break. It
    calls `multiply(call, panel, row, end)` for the rows [row, end). That is compiled by
    `njit(inline="always")`.
    """

    def run(pointer):
        call = carray(pointer, 1)[0]
        parts = max(1, (call.rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE)
        groups = (call.panels + call.at_once - 1) // call.at_once
        lanes = call.threads if parts == 1 else 1
        in_lane = (groups + lanes - 1) // lanes
        while True:
            number = take(call.counter)
            index = number // parts
            if index >= lanes * in_lane:
                return
            first = (index % lanes * in_lane + index // lanes) * call.at_once
            row = number % parts * ROWS_AT_ONCE
            end = min(row + ROWS_AT_ONCE, call.rows)
            for panel in range(first, min(first + call.at_once, call.panels)):
                multiply(call, panel, row, end)

    return run, call_type
