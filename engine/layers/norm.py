"""Normalisation layers with their weights.

`add` adds a sublayer's output to the residual stream and norms the sum, in one launch on a GPU.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.ops.kernels import Kernels
from engine.ops.norm import Tensors, add_layer_norm, add_rms_norm, layer_norm, rms_norm


class RMSNorm(nn.Module):
    offset = False  # whether the stored weight is weight - 1

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, kernels=self.kernels)

    def add(
        self, x: torch.Tensor, delta: torch.Tensor | None, post: RMSNorm | None = None
    ) -> Tensors:
        """Return x + delta, or x + post(delta), and the norm of the sum; without delta, of x.

        `post` must have the same type and eps as this norm.
        """
        if delta is None:
            return x, self(x)
        weight = None if post is None else post.weight
        return add_rms_norm(
            x, delta, self.weight, self.eps, offset=self.offset, post=weight, kernels=self.kernels
        )


class OffsetRMSNorm(RMSNorm):
    """RMSNorm as in Gemma: the stored weight is weight - 1."""

    offset = True


class PlainRMSNorm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, None, self.eps, kernels=self.kernels)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """Return x + delta and its norm; without delta, x and its norm."""
        if delta is None:
            return x, self(x)
        return add_rms_norm(x, delta, None, self.eps, kernels=self.kernels)


class Join(nn.Module):
    """A sum in the residual stream that no norm follows at once."""

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """Return x + delta twice, in the places of a norm's sum and result; without delta, x."""
        total = x if delta is None else x + delta
        return total, total


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, kernels=self.kernels)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> Tensors:
        """Return x + delta and its norm; without delta, x and its norm."""
        if delta is None:
            return x, self(x)
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps, kernels=self.kernels)
