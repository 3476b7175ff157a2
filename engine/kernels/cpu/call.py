"""What kernels are told: structures that Python fills in and kernels read.

What they point to must outlive the call.
"""

from __future__ import annotations

import ctypes
import math

from numba import types

INT, FLOAT = ctypes.c_int64, ctypes.c_double
KINDS = {INT: types.int64, FLOAT: types.float64}
LOG2_E = math.log2(math.e)
# Of attention, a task: sequence, first token, number of tokens, first position, and whether their
# keys and values must be there before any task attends.
TASK = 5


def signature(call: type[ctypes.Structure]) -> types.Type:
    """Of a kernel that is told this."""
    fields = [(field[0], KINDS[field[1]]) for field in call._fields_]
    return types.void(types.CPointer(types.Record.make_c_struct(fields)))


class AttentionCall(ctypes.Structure):
    """Attention of a step's tasks in one layer."""

    _fields_ = [
        ("counter", INT),  # address of the number of the next task
        ("num_tasks", INT),
        ("num_attended", INT),  # of these the first; of the others keys and values are stored
        ("tasks", INT),  # address of [tasks, TASK]
        ("heads", INT),  # of keys and values; each task is done for every one
        ("tables", INT),  # address of [sequences, table_stride] blocks
        ("table_stride", INT),
        ("token_blocks", INT),  # address of [T]
        ("token_offsets", INT),  # address of [T]
        ("query", INT),  # address of [T, H, D], a token every query_stride elements
        ("query_stride", INT),
        ("key", INT),  # address of [T, Hkv, D], a token every key_stride elements
        ("key_stride", INT),
        ("value", INT),  # the same
        ("value_stride", INT),
        ("keys", INT),  # address of [blocks, Hkv, D, block_size]
        ("values", INT),  # address of [blocks, Hkv, block_size, D]
        ("out", INT),  # address of [T, H, D]
        ("window", INT),  # visible keys
        ("scale", FLOAT),  # times log2(e): weights are powers of two, not of e
        ("softcap", FLOAT),  # the same; 0: none
    ]


class LinearCall(ctypes.Structure):
    """Few rows through a linear layer."""

    _fields_ = [
        ("counter", INT),  # address of the number of the next panels
        ("panels", INT),  # of outputs, side by side in the packed weight
        ("at_once", INT),  # panels taken off the counter
        ("weight", INT),  # address of [panels, pairs, outputs of a panel, 2] bf16
        ("bias", INT),  # address of [panels, outputs of a panel] bf16, or 0
        ("pairs", INT),  # of inputs
        ("split", INT),  # pairs after which a sum begins anew
        ("x", INT),  # address of [rows, 2 * pairs] bf16
        ("x_bytes", INT),  # from row to row
        ("out", INT),  # address of [rows, outputs] bf16
        ("out_bytes", INT),
        ("rows", INT),
    ]


class RowsCall(ctypes.Structure):
    """Something done row by row."""

    _fields_ = [
        ("counter", INT),  # address of the number of the next rows
        ("rows", INT),
        ("at_once", INT),  # rows taken off the counter
        ("size", INT),  # of a row of `out`, in elements, as are the strides
        ("x", INT),  # address of [rows, ...]
        ("x_stride", INT),
        ("other", INT),  # address of what is added to x, or 0
        ("other_stride", INT),
        ("sum", INT),  # address of [rows, size], where the sum goes
        ("weight", INT),  # address of [size], or 0
        ("out", INT),  # address of [rows, size]
        ("eps", FLOAT),
        ("offset", FLOAT),  # added to each weight
        ("dim", INT),  # of a head
        ("cos", INT),  # address of [rows, dim]
        ("sin", INT),  # address of [rows, dim]
    ]
