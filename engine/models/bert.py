"""BERT (arXiv 1810.04805): a post-norm encoder with learned positions and token types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.attention import Attention
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.norm import LayerNorm
from engine.models.base import (
    expect,
    label_count,
    layer_count,
    positive,
    positive_float,
    shared_by,
)

# Our module name -> its name in a checkpoint.
NAMES = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "blocks.{i}.qkv": "encoder.layer.{i}.attention.self.{part}",
    "blocks.{i}.out": "encoder.layer.{i}.attention.output.dense",
    "blocks.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "blocks.{i}.mlp.up": "encoder.layer.{i}.intermediate.dense",
    "blocks.{i}.mlp.down": "encoder.layer.{i}.output.dense",
    "blocks.{i}.mlp_norm": "encoder.layer.{i}.output.LayerNorm",
}
# Tensors that are not needed: the pooler and pre-training heads, and buffers of positions.
NOT_OF_THE_ENCODER = (
    *("pooler.dense.weight", "pooler.dense.bias"),
    *("embeddings.position_ids", "encoder.embed_positions.weight"),
)
HEADS = ("cls.predictions.", "cls.seq_relationship.")


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The config of a BERT checkpoint."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int
    token_types: int
    norm_eps: float
    activation: str

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "hidden_act", *ACTIVATIONS)
        expect(config, "position_embedding_type", "absolute")
        expect(config, "is_decoder", False)
        expect(config, "add_cross_attention", False)
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=positive(config, "intermediate_size"),
            layers=layer_count(config),
            heads=heads,
            max_positions=positive(config, "max_position_embeddings"),
            token_types=positive(config, "type_vocab_size"),
            norm_eps=positive_float(config, "layer_norm_eps"),
            activation=config.get("hidden_act", "gelu"),
            **own,
        )


class BertBlock(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        c, dim = config, config.hidden // config.heads
        spec = AttentionSpec(c.heads, c.heads, dim, scale=dim**-0.5, kind="full")
        parts = ("query", "key", "value")
        self.qkv = Linear(
            c.hidden,
            dict.fromkeys(parts, c.hidden),
            bias=True,
            output_units=dict.fromkeys(parts, c.heads),
        )
        self.attend = Attention(spec)
        self.out = Linear(c.hidden, c.hidden, bias=True, input_units=c.heads)
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c.hidden, c.intermediate, ACTIVATIONS[c.activation], bias=True)
        self.mlp_norm = LayerNorm(c.hidden, c.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        rotate: Callable[[torch.Tensor], torch.Tensor] = lambda qkv: qkv,
    ) -> torch.Tensor:
        """Return the block's output [T, hidden] for x [T, hidden].

        `rotate` maps the concatenated queries, keys and values [T, 3 * heads, D] to that shape.
        """
        spec = self.attend.spec
        heads = spec.num_heads
        qkv = rotate(self.qkv(x).view(len(x), 3 * heads, spec.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        _, x = self.attention_norm.add(x, self.out(self.attend(q, k, v, batch)))
        return self.mlp_norm.add(x, self.mlp(x))[1]


def of_types(types: TokenEmbedding, batch: ForwardBatch) -> torch.Tensor:
    """Return the embedding of each token's type, [T, hidden] or [hidden] if all are 0."""
    return types.weight[0] if batch.types is None else types(batch.types)


def bert_weight_map(model: nn.Module, names: Mapping[str, str], prefix: str) -> WeightMap:
    """Return the WeightMap of BERT or a relative; the encoder's names may start with `prefix`."""
    return WeightMap(
        targets_by_module(model, names),
        prefixes=("", prefix),
        ignored=NOT_OF_THE_ENCODER,
        ignored_prefixes=HEADS,
        old_endings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )


class Bert(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> BertConfig:
        return BertConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.positions = TokenEmbedding(c.max_positions, c.hidden)
        self.types = TokenEmbedding(c.token_types, c.hidden)
        self.norm = LayerNorm(c.hidden, c.norm_eps)
        self.blocks = nn.ModuleList(BertBlock(c) for _ in range(c.layers))

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids) + of_types(self.types, batch)
        x = x + self.positions(batch.positions)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, batch)
        return x

    def weight_map(self) -> WeightMap:
        return bert_weight_map(self, NAMES, "bert.")


class BertClassifier(Bert):
    """BERT with a head that reads the first token: a cross-encoder, or a classifier of texts."""

    head_pooling: PoolingMode = "cls"

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        hidden = self.config.hidden
        self.num_labels = label_count(config)
        self.pooler = Linear(hidden, hidden, bias=True)
        self.classifier = Linear(hidden, self.num_labels, bias=True, is_rounded=False)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pooler(pooled).tanh())

    def weight_map(self) -> WeightMap:
        head = {"pooler": "pooler.dense", "classifier": "classifier"}
        return bert_weight_map(self, NAMES | head, "bert.")
