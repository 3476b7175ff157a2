"""Gather and scale rows of a token embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _gather_kernel(
    ids_ptr, table_ptr, out_ptr, squares_ptr, counters_ptr, scale, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    token = tl.load(ids_ptr + row).to(tl.int64)
    table_ptr += token * size
    embedding = tl.load(table_ptr + columns, mask, 0.0)
    scaled = (embedding.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    out_ptr += row * size
    tl.store(out_ptr + columns, scaled, mask)
    if squares_ptr is not None:
        wide = scaled.to(tl.float32)
        tl.store(squares_ptr + row * tl.num_programs(1) + block, tl.sum(wide * wide))
        tl.store(counters_ptr + columns, tl.zeros([BLOCK], tl.int32), mask & (row == 0))


def gather(ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Return table[ids] * scale [T, N]; ids [T] have any integer type, table [V, N] is dense."""
    rows = len(ids)
    size = table.shape[1]
    out = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    if rows:
        blocks = triton.cdiv(size, BLOCK)
        grid = (rows, blocks)
        _gather_kernel[grid](ids, table, out, None, None, scale, size, BLOCK)
    return out


def gather_stream(
    ids: torch.Tensor, table: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `gather` does, sums of squares of parts of its rows, and zeros.

    The sums are [T, parts] in fp32. The zeros [N] int32 are counters for the programs of later
    kernels. T must not be 0.
    """
    rows, size = len(ids), table.shape[1]
    blocks = triton.cdiv(size, BLOCK)
    out = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    squares = torch.empty(rows, blocks, dtype=torch.float32, device=table.device)
    counters = torch.empty(size, dtype=torch.int32, device=table.device)
    _gather_kernel[rows, blocks](ids, table, out, squares, counters, scale, size, BLOCK)
    return out, squares, counters
