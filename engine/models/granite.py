"""Granite 3, dense (IBM): Llama with a multiplier at four places.

They scale token embeddings, attention scores, the output of each sublayer, and logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.models.base import positive_float
from engine.models.llama import Llama, LlamaBlock, LlamaConfig, llama_attention
from engine.ops.norm import Tensors

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """The config of a Granite checkpoint."""

    scale: float  # attention scale, instead of head_dim^-0.5
    residual_scale: float  # factor on the output of each sublayer
    logits_divisor: float


def granite_fields(config: dict[str, Any]) -> dict[str, float]:
    """Return the multipliers; a missing one is 1. Raises ConfigError for invalid values."""
    given = dict.fromkeys(MULTIPLIERS, 1.0) | config
    return {
        "embed_scale": positive_float(given, "embedding_multiplier"),
        "scale": positive_float(given, "attention_multiplier"),
        "residual_scale": positive_float(given, "residual_multiplier"),
        "logits_divisor": positive_float(given, "logits_scaling"),
    }


class GraniteBlock(LlamaBlock):
    def __init__(self, config: GraniteConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention = llama_attention(config, index, scale=config.scale)
        self.residual_scale = config.residual_scale

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's scaled output, as LlamaBlock."""
        x, normed = self.attention_norm.add(x, delta)
        attended = self.attention(normed, cos, sin, batch)
        x, normed = self.mlp_norm.add(x, attended * self.residual_scale)
        return x, self.mlp(normed) * self.residual_scale


class Granite(Llama):
    config: GraniteConfig
    block: ClassVar[type[nn.Module]] = GraniteBlock

    @staticmethod
    def read_config(config: dict[str, Any]) -> GraniteConfig:
        """Read config.json. Raises ConfigError as `granite_fields` does."""
        return GraniteConfig.from_hf(config, **granite_fields(config))

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.embed.scale = self.config.embed_scale  # unlike Gemma's, not rounded to the dtype

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.div(self.head(hidden, out), self.config.logits_divisor, out=out)
