"""Decoders with two kinds of layers: some attend, the others keep a recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.models.llama import LlamaConfig, llama_attention
from engine.ops.norm import Tensors

ATTENDS, RECURS = "full_attention", "linear_attention"


class HybridBlock(nn.Module):
    """Layer `index`: attention if its kind is ATTENDS, else a recurrent layer; and then `mlp`.

    `kinds` has the kind of each layer. `recurrent` builds the recurrent layer from its number among
    these. `scale` is that of attention scores. `residual_scale` multiplies the outputs of both
    sublayers.
    """

    def __init__(
        self,
        config: LlamaConfig,
        kinds: Sequence[str],
        index: int,
        recurrent: Callable[[int], nn.Module],
        mlp: nn.Module,
        *,
        scale: float | None = None,
        residual_scale: float | None = None,
    ) -> None:
        super().__init__()
        c, number = config, kinds[:index].count(kinds[index])
        self.attention_norm = c.norm(c.hidden, c.norm_eps)
        self.attention: nn.Module | None = None
        self.recurrent: nn.Module | None = None
        if kinds[index] == ATTENDS:
            self.attention = llama_attention(c, number, scale=scale)
        else:
            self.recurrent = recurrent(number)
        self.mlp_norm = c.norm(c.hidden, c.norm_eps)
        self.mlp = mlp
        self.residual_scale = residual_scale

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it."""
        x, normed = self.attention_norm.add(x, delta)
        if self.attention is not None:
            mixed = self.attention(normed, cos, sin, batch)
        else:
            assert self.recurrent is not None
            mixed = self.recurrent(normed, batch)
        x, normed = self.mlp_norm.add(x, self._scaled(mixed))
        return x, self._scaled(self.mlp(normed))

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.residual_scale is None else output * self.residual_scale
