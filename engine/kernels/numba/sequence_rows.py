"""Gather the inputs of a decode step on a CPU, and append its tokens (`source/sequence_rows.py`).

A step may have few numbers, but torch takes longer to call an operation than to compute it.
"""

from __future__ import annotations

import ctypes

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import TASK
from engine.kernels.numba.compilers import Kernel
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.rows_calls import AppendCall, InputsCall, ParamsCall, TasksCall

INPUTS: Kernel = ("sequence_rows.inputs_kernel",)
TASKS: Kernel = ("sequence_rows.tasks_kernel",)
PARAMS: Kernel = ("sequence_rows.params_kernel",)
APPEND: Kernel = ("sequence_rows.append_kernel",)
DECODE_KERNELS = (INPUTS, TASKS, PARAMS, APPEND)


def gather_inputs(
    row_ids: torch.Tensor,
    ahead: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Return the fields of ops.sequence_rows.DecodeInputs, in their order, for row_ids [R] int64.

    The entries of block tables behind a row's last token are not set.
    """
    groups, held_rows, width = block_tables.shape
    assert tokens.is_contiguous()
    assert block_tables.is_contiguous()
    count = len(row_ids)
    own_lengths = torch.empty(count, dtype=torch.int32)
    positions, input_ids, offsets = (torch.empty(count, dtype=torch.int64) for _ in range(3))
    blocks = torch.empty(groups, count, dtype=torch.int64)
    own_tables = torch.empty(groups, count, width, dtype=torch.int64)
    call = InputsCall(
        rows=count,
        row_ids=row_ids.data_ptr(),
        ahead=ahead.data_ptr(),
        tokens=tokens.data_ptr(),
        max_tokens=tokens.shape[1],
        known=lengths.data_ptr(),
        groups=groups,
        tables=block_tables.data_ptr(),
        held_rows=held_rows,
        width=width,
        block_size=block_size,
        lengths=own_lengths.data_ptr(),
        positions=positions.data_ptr(),
        input_ids=input_ids.data_ptr(),
        offsets=offsets.data_ptr(),
        blocks=blocks.data_ptr(),
        own_tables=own_tables.data_ptr(),
    )
    _run(INPUTS, call)
    return own_lengths, positions, input_ids, offsets, blocks, own_tables


def decode_tasks(lengths: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the tasks of R single tokens, the last of sequences with `lengths` [R] int32.

    They are [2, R, bytes of a TASK] uint8: as planned, and all with their KV stored ahead.
    """
    count = len(lengths)
    tasks = torch.empty(2, count, TASK.itemsize, dtype=torch.uint8)
    call = TasksCall(
        rows=count, lengths=lengths.data_ptr(), block_size=block_size, tasks=tasks.data_ptr()
    )
    _run(TASKS, call)
    return tasks


def draw_params(
    row_ids: torch.Tensor, ahead: torch.Tensor, *columns: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the fields of DrawParams for row_ids [R] int64, with int64 positions.

    `columns` are the same fields of all rows, whose positions are int32. They grow by `ahead`.
    """
    *filters, seeds, known = columns
    assert all(column.itemsize == 4 for column in filters)
    count = len(row_ids)
    own = [torch.empty(count, dtype=column.dtype) for column in (*filters, seeds)]
    positions = torch.empty(count, dtype=torch.int64)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds")
    call = ParamsCall(
        rows=count,
        row_ids=row_ids.data_ptr(),
        ahead=ahead.data_ptr(),
        known=known.data_ptr(),
        positions=positions.data_ptr(),
    )
    for name, column, new in zip(names, (*filters, seeds), own, strict=True):
        setattr(call, name, column.data_ptr())
        setattr(call, f"own_{name}", new.data_ptr())
    _run(PARAMS, call)
    return *own, positions


def append_tokens(
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    ahead: torch.Tensor,
    new: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    padding: int,
) -> None:
    """Append tokens as `ops.sequence_rows.append` does."""
    assert tokens.is_contiguous()
    call = AppendCall(
        rows=len(row_ids),
        row_ids=row_ids.data_ptr(),
        positions=positions.data_ptr(),
        ahead=ahead.data_ptr(),
        new=new.data_ptr(),
        tokens=tokens.data_ptr(),
        max_tokens=tokens.shape[1],
        lengths=lengths.data_ptr(),
        padding=padding,
    )
    _run(APPEND, call)


def _run(kernel: Kernel, call: ctypes.Structure) -> None:
    in_threads(kernel_store().address(str(kernel[0])), call, alone=True)
