"""RoFormer (arXiv 2104.09864): BERT with rotary position embedding of neighbouring dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import WeightMap
from engine.errors import ConfigError
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.layers.rotary import PairRotaryEmbedding
from engine.models.base import expect, positive
from engine.models.bert import NAMES, BertBlock, BertConfig, bert_weight_map, of_types
from engine.ops.kernels import Kernels
from engine.ops.rotary import apply_rotary_pairs

THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoFormerConfig(BertConfig):
    """The config of a RoFormer checkpoint."""

    embedding: int  # width of the token embeddings
    rotary_value: bool  # whether values are rotated too

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "rotary_value", True, False)
        embedding = positive(config, "embedding_size", positive(config, "hidden_size"))
        rotary_value = config.get("rotary_value", False)
        facts = super(RoFormerConfig, cls).from_hf(
            config, embedding=embedding, rotary_value=rotary_value, **own
        )
        if facts.hidden // facts.heads % 2:
            raise ConfigError(
                f"config.json has {facts.heads} heads of {facts.hidden // facts.heads} dimensions; "
                "rotary embedding needs an even number."
            )
        return facts


class RoFormer(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> RoFormerConfig:
        return RoFormerConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.embedding, divisible=True)
        assert c.token_types is not None
        self.types = TokenEmbedding(c.token_types, c.embedding)
        self.norm = LayerNorm(c.embedding, c.norm_eps)
        wider = c.embedding != c.hidden
        self.project = Linear(c.embedding, c.hidden, bias=True) if wider else None
        self.rotary = PairRotaryEmbedding(c.hidden // c.heads, THETA, max_positions, dtype)
        self.blocks = nn.ModuleList(BertBlock(c) for _ in range(c.layers))
        self.kernels: Kernels = "torch"

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.norm(self.embed(batch.input_ids) + of_types(self.types, batch))
        if self.project is not None:
            x = self.project(x)
        cos, sin = self.rotary(batch.positions)

        def rotate(qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.shape[1] // 3
            rotated = heads * (3 if self.config.rotary_value else 2)
            turned = apply_rotary_pairs(qkv[:, :rotated], cos, sin, kernels=self.kernels)
            return torch.cat((turned, qkv[:, rotated:]), dim=1)

        for block in self.blocks:
            x = block(x, batch, rotate)
        return x

    def weight_map(self) -> WeightMap:
        return bert_weight_map(self, NAMES | {"project": "embeddings_project"}, ["roformer."])
