"""EmbeddingGemma (arXiv 2509.20354): Gemma 3 whose tokens see those after them, as an encoder.

A windowed layer sees half of `sliding_window` to each side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.embedding import ScaledTokenEmbedding
from engine.layers.rotary import RotaryEmbedding, expect_one_table
from engine.models.base import expect, required
from engine.models.gemma2 import NAMES_GEMMA2, Gemma2Block
from engine.models.gemma3 import Gemma3, Gemma3Config

NAMES = {ours: theirs.removeprefix("model.") for ours, theirs in NAMES_GEMMA2.items()}


class EmbeddingGemma(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        required(config, "use_bidirectional_attention")
        expect(config, "use_bidirectional_attention", True)
        facts = Gemma3.read_config(config | {"use_bidirectional_attention": False})
        for scaling in (facts.rope_scaling, facts.local_scaling):
            expect_one_table(scaling)
        windows = tuple(None if size is None else size // 2 + 1 for size in facts.windows)
        return replace(facts, windows=windows, bidirectional=True)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = ScaledTokenEmbedding(
            c.vocab_size, c.hidden, c.embed_scale, dtype, divisible=True
        )
        self.rotary = RotaryEmbedding(
            c.head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.local_rotary = RotaryEmbedding(
            c.head_dim, c.local_theta, c.local_scaling, max_positions, dtype
        )
        self.blocks = nn.ModuleList(Gemma2Block(c, i) for i in range(c.layers))
        self.norm = c.norm(c.hidden, c.norm_eps)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta, post = self.embed(batch.input_ids), None, None
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            angles = everywhere if window is None else nearby
            x, delta, post = block(x, delta, post, *angles, batch)
        return self.norm.add(x, delta, post)[1]

    def weight_map(self) -> WeightMap:
        return WeightMap(targets_by_module(self, NAMES), prefixes=("", "model."))
