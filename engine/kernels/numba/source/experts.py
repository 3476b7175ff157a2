"""Linear layers of experts or heads: each has its own call, and some of the rows."""

from __future__ import annotations

import numpy as np
from numba import carray

from engine.kernels.numba.call import ROW_FIELD, ExpertsCall
from engine.kernels.numba.source.intrinsics import array_at, take
from engine.kernels.numba.source.program import run_kernel


def share_kernel():
    """Return the kernel that writes into each expert's call where its rows are, and how many.

    A field may replace how many: all heads have the same number of rows.
    """

    def share(pointer):
        call = carray(pointer, 1)[0]
        starts = array_at(call.starts, (1,), np.int64)
        fields = array_at(call.fields, (1,), ROW_FIELD)
        if take(call.counter):
            return
        for expert in range(call.experts):
            own = call.calls + call.call_bytes * expert
            rows = array_at(own + call.rows_offset, (1,), np.int64)
            rows[0] = starts[expert + 1] - starts[expert]
            for index in range(call.num_fields):
                field = fields[index]
                place = array_at(own + field.offset, (1,), np.int64)
                place[0] = field.base + field.row_bytes * starts[expert]
            counter = array_at(call.counters + 64 * expert, (1,), np.int64)
            counter[0] = 0

    return share, ExpertsCall


def run_experts_kernel():
    """Return the kernel that multiplies the rows of all experts that have some."""

    def run_experts(pointer):
        call = carray(pointer, 1)[0]
        starts = array_at(call.starts, (1,), np.int64)
        for expert in range(call.experts):
            if starts[expert] < starts[expert + 1]:
                run_kernel(call.kernel, call.calls + call.call_bytes * expert)

    return run_experts, ExpertsCall
