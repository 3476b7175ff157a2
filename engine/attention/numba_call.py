"""What the kernels that Numba compiles are told, as Python fills it in and as they read it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from numba import types

LOG2_E = math.log2(math.e)
# Sequence, first token, number of tokens, first position, and whether their keys and values must
# be there before any task attends.
TASK = 5
FIELDS = {
    "counter": "int64",  # address of the number of the next task
    "num_tasks": "int64",
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
C_TYPES: dict[str, Any] = {"int64": ctypes.c_int64, "float64": ctypes.c_double}
RECORD = types.Record.make_c_struct([(name, getattr(types, kind)) for name, kind in FIELDS.items()])


class Call(ctypes.Structure):
    """One call of a kernel. What it points to must outlive it."""

    _fields_ = [(name, C_TYPES[kind]) for name, kind in FIELDS.items()]
