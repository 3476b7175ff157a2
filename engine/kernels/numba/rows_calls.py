"""The arguments of the CPU kernels for the rows of decodes, as in `call.py`."""

from __future__ import annotations

import ctypes

from engine.kernels.numba.call import INT


class InputsCall(ctypes.Structure):
    """Arguments of the gathering of the inputs of R rows, see `gather_decode_inputs`."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next row
        ("rows", INT),  # R
        ("row_ids", INT),  # address of [R]
        ("ahead", INT),  # address of [R]
        ("tokens", INT),  # address of [held_rows, max_tokens] int32
        ("max_tokens", INT),
        ("known", INT),  # address of [held_rows] int32
        ("groups", INT),  # number of KV groups
        ("tables", INT),  # address of [groups, held_rows, width]
        ("held_rows", INT),
        ("width", INT),  # entries in a block table
        ("block_size", INT),
        ("lengths", INT),  # address of [R] int32, the first result
        ("positions", INT),  # address of [R]
        ("input_ids", INT),  # address of [R]
        ("offsets", INT),  # address of [R]
        ("blocks", INT),  # address of [groups, R]
        ("own_tables", INT),  # address of [groups, R, width]
    ]


class TasksCall(ctypes.Structure):
    """Arguments of the writing of a task for each of R single tokens."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next token
        ("rows", INT),  # R
        ("lengths", INT),  # address of [R] int32
        ("block_size", INT),
        ("tasks", INT),  # address of [2, R] TASK: as planned, and with all KV stored ahead
    ]


class ParamsCall(ctypes.Structure):
    """Arguments of the gathering of the draw's parameters of R rows."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next row
        ("rows", INT),  # R
        ("row_ids", INT),  # address of [R]
        ("ahead", INT),  # address of [R]
        ("known", INT),  # address of int32, one for each row that is held, as the next ones
        ("temperature", INT),  # fp32
        ("top_k", INT),  # int32
        ("top_p", INT),  # fp32
        ("min_p", INT),  # fp32
        ("seeds", INT),
        ("positions", INT),  # address of [R]: of the drawn tokens
        ("own_temperature", INT),  # address of [R], as the next ones
        ("own_top_k", INT),
        ("own_top_p", INT),
        ("own_min_p", INT),
        ("own_seeds", INT),
    ]


class AppendCall(ctypes.Structure):
    """Arguments of the appending of R tokens to rows."""

    _fields_ = [
        ("counter", INT),  # address of the index of the next token
        ("rows", INT),  # R
        ("row_ids", INT),  # address of [R]
        ("positions", INT),  # address of [R]
        ("ahead", INT),  # address of [R]
        ("new", INT),  # address of [R]: the tokens; negative ones are stored as 0
        ("tokens", INT),  # address of [held rows, max_tokens] int32
        ("max_tokens", INT),
        ("lengths", INT),  # address of [held rows] int32
        ("padding", INT),  # the row that keeps its length
    ]
