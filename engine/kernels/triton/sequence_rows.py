"""Gather the inputs of a captured step from its rows, and append its tokens; one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # entries of a block table that are copied at a time


@triton.jit
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


@triton.jit
def _append_kernel(
    row_ids_ptr, positions_ptr, ahead_ptr, new_ptr, tokens_ptr, lengths_ptr, width, padding
):
    index = tl.program_id(0)
    row = tl.load(row_ids_ptr + index)
    if row != padding:
        position = tl.load(positions_ptr + index)
        token = tl.maximum(tl.load(new_ptr + index), 0).to(tl.int32)
        tl.store(tokens_ptr + row * width + position, token)
        if tl.load(ahead_ptr + index) == 0:
            tl.store(lengths_ptr + row, (position + 1).to(tl.int32))


def append_tokens(
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    ahead: torch.Tensor,
    new: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    padding: int,
) -> None:
    """Write `new` at `positions` of the tokens [N, L] of `row_ids`, all [R] int64.

    The lengths of rows that are not `ahead` [R] int64 then end behind the new token.
    Negative tokens are stored as 0. The row `padding` is left unchanged.
    """
    _append_kernel[(len(row_ids),)](
        row_ids, positions, ahead, new, tokens, lengths, tokens.shape[1], padding
    )
