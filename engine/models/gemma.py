"""Gemma (arXiv 2403.08295): GeGLU, (1 + weight) norms, embeddings times sqrt(hidden), tied head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.layers.embedding import LMHead, ScaledEmbedding
from engine.layers.norm import OffsetRMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.models.base import expect
from engine.models.llama import NAMES, LlamaBlock, LlamaConfig
from engine.weights.rules import WeightMap, targets_by_module


def gemma_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A Gemma config in Llama's words; ConfigError for variants no Gemma file computes.

    "gelu" is what the first releases called the tanh form; all were trained with that.
    """
    expect(config, "hidden_act", None, "gelu", "gelu_pytorch_tanh")
    expect(config, "hidden_activation", None, "gelu_pytorch_tanh")
    expect(config, "use_bidirectional_attention", None, False)
    return {"tie_word_embeddings": True} | config | {"hidden_act": "gelu_pytorch_tanh"}


class Gemma(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """The facts of a Gemma checkpoint; ConfigError for a missing key or another variant."""
        return LlamaConfig.from_hf(gemma_spelling(config))

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = ScaledEmbedding(c.vocab_size, c.hidden, c.hidden**0.5, dtype)
        self.rotary = RotaryEmbedding(
            c.head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.blocks = nn.ModuleList(LlamaBlock(c, i, OffsetRMSNorm) for i in range(c.layers))
        self.norm = OffsetRMSNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x, delta = block(x, delta, cos, sin, batch)
        return self.norm.add(x, delta)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def weight_map(self) -> WeightMap:
        aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        targets = targets_by_module(self, NAMES)
        return WeightMap(targets, aliases=aliases, ignored=("rotary_emb.inv_freq",))
