"""Normalisation layers with their weights.

`add` joins a sublayer's result to the residual stream and norms the sum, in one launch on a GPU.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.ops.norm import Tensors, add_layer_norm, add_rms_norm, layer_norm, rms_norm


class RMSNorm(nn.Module):
    offset = False  # whether the weight is stored as its distance from one

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(
        self, x: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None = None
    ) -> Tensors:
        """x + delta, or x + post(delta), and the norm of that; without a delta, of x itself.

        `post` is a norm of the same kind and eps.
        """
        if delta is None:
            return x, self(x)
        weight = None if post is None else post.weight
        return add_rms_norm(x, delta, self.weight, self.eps, offset=self.offset, post=weight)


class OffsetRMSNorm(RMSNorm):
    """Gemma's: the weight is stored as its distance from one."""

    offset = True


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """x + delta and its norm; without a delta, x and its norm."""
        if delta is None:
            return x, self(x)
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps)
