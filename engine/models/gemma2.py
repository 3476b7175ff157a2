"""Gemma 2 (arXiv 2408.00118): Gemma with norms before and after each sublayer, and softcaps.

Every other layer has a sliding window. The attention scale is a config value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.layers.embedding import LMHead, ScaledTokenEmbedding
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.models.base import layer_windows, nullable, positive, positive_float
from engine.models.gemma import gemma_facts, gemma_spelling
from engine.models.llama import NAMES, LlamaConfig, llama_attention
from engine.ops.kernels import Kernels
from engine.ops.softcap import softcap

NAMES_GEMMA2 = NAMES | {
    "blocks.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
    "blocks.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    """The config of a Gemma 2 checkpoint."""

    norm: type[RMSNorm] = RMSNorm
    scale: float  # attention scale, instead of head_dim^-0.5
    attention_softcap: float | None
    final_softcap: float | None


class Gemma2Block(nn.Module):
    """A block of Gemma 2 or GLM-4, or of Gemma 3 if the config has `qk_norm`."""

    def __init__(self, config: Gemma2Config, index: int) -> None:
        super().__init__()
        c, norm = config, partial(config.norm, eps=config.norm_eps)
        self.attention_norm = norm(c.hidden)
        self.attention = llama_attention(c, index, scale=c.scale, softcap=c.attention_softcap)
        self.attention_post_norm = norm(c.hidden)
        self.mlp_norm = norm(c.hidden)
        self.mlp = GatedMLP(c.hidden, c.intermediate, c.activation, bias=c.mlp_bias)
        self.mlp_post_norm = norm(c.hidden)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        post: RMSNorm | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor, RMSNorm]:
        """Return the residual stream [T, hidden], the MLP's output and its post-norm.

        `x`, `delta` and `post` are these three values of the previous block. The post-norm and
        the addition are fused with the next norm.
        """
        x, normed = self.attention_norm.add(x, delta, post)
        attended = self.attention(normed, cos, sin, batch)
        x, normed = self.mlp_norm.add(x, attended, self.attention_post_norm)
        return x, self.mlp(normed), self.mlp_post_norm


class Gemma2(nn.Module):
    names: ClassVar[Names] = NAMES_GEMMA2

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma2Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return Gemma2Config.from_hf(
            gemma_spelling(config),
            **gemma_facts(config),
            windows=layer_windows(
                config, nullable(config, "sliding_window", positive), lambda i: i % 2 == 0
            ),
            scale=positive_float(config, "query_pre_attn_scalar") ** -0.5,
            attention_softcap=nullable(config, "attn_logit_softcapping", positive_float),
            final_softcap=nullable(config, "final_logit_softcapping", positive_float),
        )

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = ScaledTokenEmbedding(
            c.vocab_size, c.hidden, c.embed_scale, dtype, divisible=True
        )
        self.rotary = RotaryEmbedding(
            c.head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype, pairs=c.pairs
        )
        self.blocks = nn.ModuleList(Gemma2Block(c, i) for i in range(c.layers))
        self.norm = c.norm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)
        self.kernels: Kernels = "torch"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta, post = self.embed(batch.input_ids), None, None
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x, delta, post = block(x, delta, post, cos, sin, batch)
        return self.norm.add(x, delta, post)[1]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits, cap = self.head(hidden, out), self.config.final_softcap
        return logits if cap is None else softcap(logits, cap, out, kernels=self.kernels)

    def weight_map(self) -> WeightMap:
        aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        return WeightMap(targets_by_module(self, self.names), aliases=aliases)
