"""MPNet (arXiv 2004.09297): RoBERTa without token types, with T5's relative bias in attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from engine.attention.batch import ForwardBatch
from engine.attention.spec import RelativeBias
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import Names
from engine.layers.classification_head import ClassificationHead
from engine.layers.embedding import TokenEmbedding
from engine.models.base import expect, label_count
from engine.models.bert import NAMES, TANH
from engine.models.roberta import HEAD, PAD, Roberta, RobertaConfig

# transformers reads the number from config.json, but computes the buckets of 32.
BUCKETS, MAX_DISTANCE = 32, 128
PARTS = {"query": "q", "key": "k", "value": "v"}
NAMES_MPNET: Names = {
    **NAMES,
    "table": "encoder.relative_attention_bias",
    "blocks.{i}.qkv": {
        part: f"encoder.layer.{{i}}.attention.attn.{name}" for part, name in PARTS.items()
    },
    "blocks.{i}.out": "encoder.layer.{i}.attention.attn.o",
    "blocks.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
}


class MPNet(Roberta):
    names = NAMES_MPNET
    prefixes = ("mpnet.",)

    @staticmethod
    def read_config(config: dict[str, Any]) -> RobertaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        Positions count tokens that are not 1. Like transformers, it does not read `pad_token_id`.
        """
        expect(config, "relative_attention_num_buckets", BUCKETS)
        return RobertaConfig.from_hf(
            config | {"pad_token_id": PAD},
            token_types=None,
            relative=RelativeBias(BUCKETS, MAX_DISTANCE, bidirectional=True),
        )

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        heads = self.config.heads
        self.table = TokenEmbedding(BUCKETS, heads, column_units=heads)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedded(batch)
        for block in self.blocks:
            x = block(x, batch, bias=self.table.weight)
        return x


class MPNetClassifier(MPNet):
    """MPNet with a head that reads the first token."""

    names: ClassVar[Names] = {**NAMES_MPNET, **HEAD}
    head_pooling: PoolingMode = "cls"
    passed_over = None

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.num_labels = label_count(config)
        self.head = ClassificationHead(self.config.hidden, self.num_labels, TANH)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)
