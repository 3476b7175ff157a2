"""BERT (arXiv 1810.04805): a post-norm encoder with learned positions and token types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.layers.attention import Attention
from engine.layers.classification_head import ClassificationHead
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS, GATED_OF_ENCODERS, MLP, in_torch
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
TANH = in_torch(torch.tanh)


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """The config of a BERT checkpoint, or of a relative with the same blocks."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int
    token_types: int | None  # None: there is no table of types
    norm_eps: float
    activation: str
    relative: RelativeBias | None = None
    attention_bias: bool = True
    gated: bool = False  # whether the feed-forward networks have a gate
    up_bias: bool = True
    down_bias: bool = True

    @property
    def position_rows(self) -> int | None:
        """The rows of the table of positions; None: there is no such table."""
        return self.max_positions

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. The fields in `own`, which a relative sets itself, take precedence.

        Raises ConfigError for a missing key or an unsupported variant.
        """
        gated = own.get("gated", False)
        expect(config, "hidden_act", *(GATED_OF_ENCODERS if gated else ACTIVATIONS))
        expect(config, "position_embedding_type", "absolute")
        expect(config, "is_decoder", False)
        expect(config, "add_cross_attention", False)
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        facts: dict[str, Any] = {
            "vocab_size": positive(config, "vocab_size"),
            "hidden": hidden,
            "intermediate": positive(config, "intermediate_size"),
            "layers": layer_count(config),
            "heads": heads,
            "max_positions": positive(config, "max_position_embeddings"),
            "norm_eps": positive_float(config, "layer_norm_eps"),
            "activation": config.get("hidden_act", "gelu"),
        }
        if "token_types" not in own:
            facts["token_types"] = positive(config, "type_vocab_size")
        return cls(**(facts | own))


class BertBlock(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        c, dim = config, config.hidden // config.heads
        spec = AttentionSpec(
            c.heads, c.heads, dim, scale=dim**-0.5, kind="full", relative=c.relative
        )
        parts = ("query", "key", "value")
        self.qkv = Linear(
            c.hidden,
            dict.fromkeys(parts, c.hidden),
            bias=c.attention_bias,
            output_units=dict.fromkeys(parts, c.heads),
        )
        self.attend = Attention(spec)
        self.out = Linear(c.hidden, c.hidden, bias=c.attention_bias, input_units=c.heads)
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(
            c.hidden,
            c.intermediate,
            (GATED_OF_ENCODERS if c.gated else ACTIVATIONS)[c.activation],
            parts=("gate", "up") if c.gated else ("",),
            bias=c.up_bias,
            down_bias=c.down_bias,
        )
        self.mlp_norm = LayerNorm(c.hidden, c.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        rotate: Callable[[torch.Tensor], torch.Tensor] = lambda qkv: qkv,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the block's output [T, hidden] for x [T, hidden].

        `rotate` maps the concatenated queries, keys and values [T, 3 * heads, D] to that shape.
        `bias` [buckets, heads] belongs to a config with `relative`.
        """
        spec = self.attend.spec
        heads = spec.num_heads
        qkv = rotate(self.qkv(x).view(len(x), 3 * heads, spec.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        _, x = self.attention_norm.add(x, self.out(self.attend(q, k, v, batch, bias)))
        return self.mlp_norm.add(x, self.mlp(x))[1]


def of_types(types: TokenEmbedding, batch: ForwardBatch) -> torch.Tensor:
    """Return the embedding of each token's type, [T, hidden] or [hidden] if all are 0."""
    return types.weight[0] if batch.types is None else types(batch.types)


def bert_weight_map(
    model: nn.Module, names: Names, prefixes: Sequence[str], heads: Sequence[str] = HEADS
) -> WeightMap:
    """Return the WeightMap of BERT or a relative.

    The encoder's names may start with one of `prefixes`. Names that start with one of `heads` are
    not the encoder's, and are ignored.
    """
    return WeightMap(
        targets_by_module(model, names),
        prefixes=("", *prefixes),
        ignored=NOT_OF_THE_ENCODER,
        ignored_prefixes=heads,
        old_endings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )


class Bert(nn.Module):
    # A relative may have other names of tensors.
    names: ClassVar[Names] = NAMES
    prefixes: ClassVar[Sequence[str]] = ("bert.",)
    heads: ClassVar[Sequence[str]] = HEADS

    @staticmethod
    def read_config(config: dict[str, Any]) -> BertConfig:
        return BertConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.positions = _table(c.position_rows, c.hidden)
        self.types = _table(c.token_types, c.hidden)
        self.norm = LayerNorm(c.hidden, c.norm_eps)
        self.blocks = nn.ModuleList(BertBlock(c) for _ in range(c.layers))

    def rows_of_positions(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the row [T] int64 of each token in the table of positions."""
        return batch.positions

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the normed sum [T, hidden] of the embeddings of tokens, types and positions."""
        x = self.embed(batch.input_ids)
        if self.types is not None:
            x = x + of_types(self.types, batch)
        if self.positions is not None:
            x = x + self.positions(self.rows_of_positions(batch))
        return self.norm(x)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedded(batch)
        for block in self.blocks:
            x = block(x, batch)
        return x

    def weight_map(self) -> WeightMap:
        return bert_weight_map(self, self.names, self.prefixes, self.heads)


class BertClassifier(Bert):
    """BERT with a head that reads the first token: a cross-encoder, or a classifier of texts."""

    names = NAMES | {"head.dense": "pooler.dense", "head.out": "classifier"}
    head_pooling: PoolingMode = "cls"
    passed_over = None

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.num_labels = label_count(config)
        self.head = ClassificationHead(self.config.hidden, self.num_labels, TANH)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)


def _table(rows: int | None, hidden: int) -> TokenEmbedding | None:
    return None if rows is None else TokenEmbedding(rows, hidden)
