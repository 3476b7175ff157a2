"""RoBERTa (arXiv 1907.11692), XLM-RoBERTa and CamemBERT: BERT with positions from pad + 1 on.

A position counts the tokens before it that are not the padding token. So the table of positions
has rows that no text reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.sentence_modules import PoolingMode
from engine.errors import ConfigError
from engine.layers.classification_head import ClassificationHead
from engine.models.base import label_count, positive
from engine.models.bert import NAMES, TANH, Bert, BertConfig

PAD = 1  # the default of transformers
HEAD = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(BertConfig):
    """The config of a RoBERTa checkpoint."""

    pad: int  # the padding token, and the row of its position

    @property
    def position_rows(self) -> int:
        return self.max_positions + self.pad + 1

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        pad, rows = config.get("pad_token_id", PAD), positive(config, "max_position_embeddings")
        if type(pad) is not int or not 0 <= pad < positive(config, "vocab_size"):
            raise ConfigError(
                f"config.json has pad_token_id = {pad!r}; this architecture needs a token, because "
                "positions count from it."
            )
        if rows < pad + 2:
            raise ConfigError(
                f"config.json has max_position_embeddings = {rows}; with pad_token_id = {pad}, it "
                f"must be at least {pad + 2}."
            )
        own = {"max_positions": rows - pad - 1, "pad": pad} | own
        return super(RobertaConfig, cls).from_hf(config, **own)


class Roberta(Bert):
    config: RobertaConfig
    prefixes = ("roberta.",)
    heads = ("lm_head.",)

    @staticmethod
    def read_config(config: dict[str, Any]) -> RobertaConfig:
        return RobertaConfig.from_hf(config)

    def rows_of_positions(self, batch: ForwardBatch) -> torch.Tensor:
        pad = self.config.pad
        counts = (batch.input_ids != pad).long()
        until = counts.cumsum(0)
        starts = torch.arange(len(counts), device=counts.device) - batch.positions
        before_text = (until - counts).index_select(0, starts)
        return pad + (until - before_text) * counts


class RobertaClassifier(Roberta):
    """RoBERTa with a head that reads the first token."""

    names = NAMES | HEAD
    head_pooling: PoolingMode = "cls"
    passed_over = None

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.num_labels = label_count(config)
        self.head = ClassificationHead(self.config.hidden, self.num_labels, TANH)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)
