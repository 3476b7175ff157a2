"""Attention: the place where a model's layer meets the paged cache."""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec


class Attention(nn.Module):
    """Holds no weights: the facts of layer `index` and the call into the step's plan."""

    def __init__(self, spec: AttentionSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H * D]."""
        kv = batch.kv.layers[self.index]
        return batch.plan.attend(self.spec, kv, q, k, v).flatten(1)
