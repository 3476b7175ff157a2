"""Read the inputs of a decode step from the rows of sequences, and append the sampled tokens."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.kernels.numba.call import TASK
from engine.kernels.numba.rows_calls import AppendCall, InputsCall, ParamsCall, TasksCall
from engine.kernels.numba.source.intrinsics import array_at, take


@njit(inline="always")
def copy(column, row, own, index, kind):
    """Copy the number of a row at the address `column` to the entry `index` at `own`."""
    array_at(own, (1,), kind)[index] = array_at(column, (1,), kind)[row]


def inputs_kernel():
    """Return the kernel that gathers the inputs of R rows, as `gather_decode_inputs` defines them.

    Of a block table it copies the entries up to the token's own.
    """

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        row_ids = array_at(call.row_ids, (1,), np.int64)
        ahead = array_at(call.ahead, (1,), np.int64)
        tokens = array_at(call.tokens, (1, call.max_tokens), np.int32)
        known = array_at(call.known, (1,), np.int32)
        tables = array_at(call.tables, (1, call.held_rows, call.width), np.int64)
        lengths = array_at(call.lengths, (1,), np.int32)
        positions = array_at(call.positions, (1,), np.int64)
        input_ids = array_at(call.input_ids, (1,), np.int64)
        offsets = array_at(call.offsets, (1,), np.int64)
        blocks = array_at(call.blocks, (1, call.rows), np.int64)
        own_tables = array_at(call.own_tables, (1, call.rows, call.width), np.int64)
        while True:
            index = take(call.counter)
            if index >= call.rows:
                return
            row = row_ids[index]
            position = known[row] + ahead[index] - 1
            entry = position // call.block_size
            lengths[index] = position + 1
            positions[index] = position
            input_ids[index] = tokens[row, position]
            offsets[index] = position % call.block_size
            for group in range(call.groups):
                blocks[group, index] = tables[group, row, entry]
                for place in range(entry + 1):
                    own_tables[group, index, place] = tables[group, row, place]

    return over_rows, InputsCall


def tasks_kernel():
    """Return the kernel that writes the tasks of single tokens, as `step_tasks` does."""

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        lengths = array_at(call.lengths, (1,), np.int32)
        tasks = array_at(call.tasks, (2, call.rows), TASK)
        while True:
            index = take(call.counter)
            if index >= call.rows:
                return
            length = np.int64(lengths[index])
            for copy in range(2):
                task = tasks[copy, index]
                task.sequence = index
                task.first_token = index
                task.num_tokens = 1
                task.position = length - 1
                task.num_keys = length
                task.is_stored_ahead = copy == 1 or length % call.block_size == 0

    return over_rows, TasksCall


def params_kernel():
    """Return the kernel that gathers the parameters of the draw of R rows."""

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        row_ids = array_at(call.row_ids, (1,), np.int64)
        ahead = array_at(call.ahead, (1,), np.int64)
        known = array_at(call.known, (1,), np.int32)
        positions = array_at(call.positions, (1,), np.int64)
        while True:
            index = take(call.counter)
            if index >= call.rows:
                return
            row = row_ids[index]
            copy(call.temperature, row, call.own_temperature, index, np.float32)
            copy(call.top_k, row, call.own_top_k, index, np.int32)
            copy(call.top_p, row, call.own_top_p, index, np.float32)
            copy(call.min_p, row, call.own_min_p, index, np.float32)
            copy(call.seeds, row, call.own_seeds, index, np.int64)
            positions[index] = known[row] + ahead[index]

    return over_rows, ParamsCall


def append_kernel():
    """Return the kernel that appends tokens to rows, as `append` defines it."""

    def over_rows(pointer):
        call = carray(pointer, 1)[0]
        row_ids = array_at(call.row_ids, (1,), np.int64)
        ahead = array_at(call.ahead, (1,), np.int64)
        positions = array_at(call.positions, (1,), np.int64)
        new = array_at(call.new, (1,), np.int64)
        tokens = array_at(call.tokens, (1, call.max_tokens), np.int32)
        lengths = array_at(call.lengths, (1,), np.int32)
        while True:
            index = take(call.counter)
            if index >= call.rows:
                return
            row = row_ids[index]
            tokens[row, positions[index]] = max(new[index], 0)
            if row != call.padding and ahead[index] == 0:
                lengths[row] += 1

    return over_rows, AppendCall
