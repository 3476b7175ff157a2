"""Gather and scale rows of a token embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _gather_kernel(ids_ptr, table_ptr, out_ptr, scale, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    token = tl.load(ids_ptr + row).to(tl.int64)
    table_ptr += token * size
    embedding = tl.load(table_ptr + columns, mask, 0.0)
    scaled = embedding.to(tl.float32) * scale
    out_ptr += row * size
    tl.store(out_ptr + columns, scaled.to(out_ptr.dtype.element_ty), mask)


def gather(ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Return table[ids] * scale [T, N]; ids [T] have any integer type, table [V, N] is dense."""
    rows = len(ids)
    size = table.shape[1]
    out = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    if rows:
        blocks = triton.cdiv(size, BLOCK)
        grid = (rows, blocks)
        _gather_kernel[grid](ids, table, out, scale, size, BLOCK)
    return out
