"""Attention: the place where a model's layer meets the paged cache."""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec


class Attention(nn.Module):
    """Holds no weights: the facts of layer `index` and the call into the step's plan."""

    def __init__(self, spec: AttentionSpec, index: int = -1) -> None:
        super().__init__()
        self.spec = spec
        self.index = index

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D], of a cross layer None; bias as in attend -> [T, H * D].

        Of an encoder's layer `index` means nothing: it has no KV.
        """
        kv = None if self.spec.kind == "full" else batch.kv.layers[self.index]
        return batch.plan.attend(self.spec, kv, q, k, v, bias).flatten(1)

    def store(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """Write a cross layer's keys and values [T, Hkv, D] of the source, once."""
        batch.plan.store(batch.kv.layers[self.index], k, v)
