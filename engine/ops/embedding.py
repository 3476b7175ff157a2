"""Lookup of rows in an embedding table."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.kernels import Kernels


def embed(
    ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0, *, kernels: Kernels
) -> torch.Tensor:
    """Return table[ids] * scale [T, N], for ids [T] and a table [V, N]."""
    if kernels == "triton":
        from engine.kernels.triton.embedding import gather

        return gather(ids, table, scale)
    rows = F.embedding(ids, table)
    return rows if scale == 1.0 else rows * scale
