"""ClassificationHead: the pooled states of texts become logits of labels."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.linear import Linear
from engine.layers.mlp import Activation
from engine.ops.kernels import Kernels


class ClassificationHead(nn.Module):
    """logits = out(norm(activation(dense(x)))). Few heads have a norm. No weight is quantised."""

    def __init__(
        self,
        hidden: int,
        labels: int,
        activation: Activation,
        *,
        bias: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dense = Linear(hidden, hidden, bias=bias, is_rounded=False)
        self.norm = nn.Identity() if norm is None else norm
        self.out = Linear(hidden, labels, bias=True, is_rounded=False)
        self.kernels: Kernels = "torch"

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits [N, labels] of pooled states [N, hidden]."""
        logits: torch.Tensor = self.out(
            self.norm(self.activation(self.dense(pooled), self.kernels))
        )
        return logits
