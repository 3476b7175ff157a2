"""Gather the inputs of a captured step from its rows, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # entries of a block table that are copied at a time


@triton.jit(do_not_specialize=["row_ids_ptr", "ahead_ptr"])  # slices
def _inputs_kernel(
    row_ids_ptr,
    ahead_ptr,
    tokens_ptr,
    lengths_ptr,
    tables_ptr,
    length_ptr,
    position_ptr,
    input_ptr,
    offset_ptr,
    block_ptr,
    table_ptr,
    rows,
    tokens_width,
    table_width,
    block_size,
    BLOCK: tl.constexpr,
):
    index, group = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ids_ptr + index)
    length = tl.load(lengths_ptr + row) + tl.load(ahead_ptr + index).to(tl.int32)
    position = length - 1
    if group == 0:
        tokens_ptr += row * tokens_width
        tl.store(length_ptr + index, length)
        tl.store(position_ptr + index, position.to(tl.int64))
        tl.store(input_ptr + index, tl.load(tokens_ptr + position).to(tl.int64))
        tl.store(offset_ptr + index, (position % block_size).to(tl.int64))
    tables_ptr += (group.to(tl.int64) * rows + row) * table_width
    place = group * tl.num_programs(0) + index
    tl.store(block_ptr + place, tl.load(tables_ptr + position // block_size))
    table_ptr += place.to(tl.int64) * table_width
    for start in range(0, table_width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < table_width
        tl.store(table_ptr + at, tl.load(tables_ptr + at, mask), mask)


def gather_inputs(
    row_ids: torch.Tensor,
    ahead: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Return the fields of ops.sequence_rows.DecodeInputs, in their order, for row_ids [R] int64.

    `ahead` [R] int64 are the drafted tokens behind the known ones. tokens [N, L] int32, lengths
    [N] int32 and block_tables [G, N, W] int64 are dense.
    """
    groups, rows, width = block_tables.shape
    count, device = len(row_ids), row_ids.device
    columns = [torch.empty(count, dtype=torch.int64, device=device) for _ in range(3)]
    length = torch.empty(count, dtype=torch.int32, device=device)
    blocks = torch.empty(groups, count, dtype=torch.int64, device=device)
    tables = torch.empty(groups, count, width, dtype=torch.int64, device=device)
    found = length, *columns, blocks, tables
    _inputs_kernel[(count, groups)](
        row_ids,
        ahead,
        tokens,
        lengths,
        block_tables,
        *found,
        rows,
        tokens.shape[1],
        width,
        block_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
    )
    return found
