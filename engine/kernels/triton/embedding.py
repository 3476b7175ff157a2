"""Gather and scale rows of a token embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _gather_kernel(ids_ptr, table_ptr, out_ptr, scale, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    token = tl.load(ids_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * size + at, mask, 0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * size + at, x.to(out_ptr.dtype.element_ty), mask)


def gather(ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Return table[ids] * scale [T, N]; ids [T] have any integer type, table [V, N] is dense."""
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    if len(ids):
        grid = len(ids), triton.cdiv(size, BLOCK)
        _gather_kernel[grid](ids, table, out, scale, size, BLOCK)
    return out
