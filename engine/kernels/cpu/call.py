"""What kernels are told, as Python fills it in and as they read it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from numba import types

C_TYPES: dict[str, Any] = {"int64": ctypes.c_int64, "float64": ctypes.c_double}


def record(fields: Mapping[str, str]) -> types.Type:
    """As a kernel reads it."""
    return types.Record.make_c_struct(
        [(name, getattr(types, kind)) for name, kind in fields.items()]
    )


def structure(fields: Mapping[str, str]) -> list[tuple[str, Any]]:
    """As ctypes fills it in. What it points to must outlive it."""
    return [(name, C_TYPES[kind]) for name, kind in fields.items()]


# ---- attention -------------------------------------------------------------------------------

LOG2_E = math.log2(math.e)
# Sequence, first token, number of tokens, first position, and whether their keys and values must
# be there before any task attends.
TASK = 5
ATTENTION = {
    "counter": "int64",  # address of the number of the next task
    "num_tasks": "int64",
    "num_attended": "int64",  # of these the first; of the others keys and values are stored
    "tasks": "int64",  # address of [tasks, TASK]
    "heads": "int64",  # of keys and values; each task is done for every one
    "tables": "int64",  # address of [sequences, table_stride] blocks
    "table_stride": "int64",
    "token_blocks": "int64",  # address of [T]
    "token_offsets": "int64",  # address of [T]
    "query": "int64",  # address of [T, H, D], a token every query_stride elements
    "query_stride": "int64",
    "key": "int64",  # address of [T, Hkv, D], a token every key_stride elements
    "key_stride": "int64",
    "value": "int64",  # the same
    "value_stride": "int64",
    "keys": "int64",  # address of [blocks, Hkv, D, block_size]
    "values": "int64",  # address of [blocks, Hkv, block_size, D]
    "out": "int64",  # address of [T, H, D]
    "window": "int64",  # visible keys
    "scale": "float64",  # times log2(e): weights are powers of two, not of e
    "softcap": "float64",  # the same; 0: none
}
ATTENTION_RECORD = record(ATTENTION)


class AttentionCall(ctypes.Structure):
    _fields_ = structure(ATTENTION)


# ---- few rows through a linear layer ---------------------------------------------------------

LINEAR = {
    "counter": "int64",  # address of the number of the next panels
    "panels": "int64",  # of outputs, side by side in the packed weight
    "at_once": "int64",  # panels taken off the counter
    "weight": "int64",  # address of [panels, pairs, outputs of a panel, 2] bf16
    "bias": "int64",  # address of [panels, outputs of a panel] bf16, or 0
    "pairs": "int64",  # of inputs
    "split": "int64",  # pairs after which a sum begins anew
    "x": "int64",  # address of [rows, 2 * pairs] bf16
    "x_bytes": "int64",  # from row to row
    "out": "int64",  # address of [rows, outputs] bf16
    "out_bytes": "int64",
    "rows": "int64",
}
LINEAR_RECORD = record(LINEAR)


class LinearCall(ctypes.Structure):
    _fields_ = structure(LINEAR)


# ---- row by row ------------------------------------------------------------------------------

ROWS = {
    "counter": "int64",  # address of the number of the next rows
    "rows": "int64",
    "at_once": "int64",  # rows taken off the counter
    "size": "int64",  # of a row of `out`, in elements, as are the strides
    "x": "int64",  # address of [rows, ...]
    "x_stride": "int64",
    "other": "int64",  # address of what is added to x, or 0
    "other_stride": "int64",
    "sum": "int64",  # address of [rows, size], where the sum goes
    "weight": "int64",  # address of [size], or 0
    "out": "int64",  # address of [rows, size]
    "eps": "float64",
    "offset": "float64",  # added to each weight
    "dim": "int64",  # of a head
    "cos": "int64",  # address of [rows, dim]
    "sin": "int64",  # address of [rows, dim]
}
ROWS_RECORD = record(ROWS)


class RowsCall(ctypes.Structure):
    _fields_ = structure(ROWS)
