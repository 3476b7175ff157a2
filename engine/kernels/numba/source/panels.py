"""The loop of the kernels that multiply rows with the panels of a weight."""

from __future__ import annotations

from numba import carray

from engine.kernels.numba.source.intrinsics import take


def panels_kernel(multiply, call_type):
    """Return a kernel whose threads take panels in turn, and call `multiply(call, panel)`.

    `multiply` is compiled by `njit(inline="always")`.
    """

    def run(pointer):
        call = carray(pointer, 1)[0]
        while True:
            first = take(call.counter) * call.at_once
            if first >= call.panels:
                return
            for panel in range(first, min(first + call.at_once, call.panels)):
                multiply(call, panel)

    return run, call_type
