"""Decoders with a head that reads the last token of a text, in place of that of the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import Target, WeightMap
from engine.layers.linear import Linear
from engine.models.base import Facts, label_count
from engine.models.llama import Llama
from engine.models.mistral import Mistral
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3


class LlamaClassifier(nn.Module):
    """Llama or a relative with a head.

    The head reads the last token that is not the padding token, also if a text ends with it, as in
    transformers.
    """

    decoder: ClassVar[type[Llama]] = Llama
    head_pooling: PoolingMode = "lasttoken"

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> Facts:
        return cls.decoder.read_config(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.trunk = self.decoder(config, max_positions=max_positions, dtype=dtype)
        self.config = self.trunk.config
        self.num_labels = label_count(config)
        self.score = Linear(self.config.hidden, self.num_labels, is_rounded=False)
        padding = config.get("pad_token_id")
        self.passed_over = padding if type(padding) is int else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.trunk(batch)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.score(pooled)

    def weight_map(self) -> WeightMap:
        own = self.trunk.weight_map()
        targets = {
            name: replace(target, parameter=f"trunk.{target.parameter}")
            for name, target in own.targets.items()
        }
        return replace(own, targets={**targets, "score.weight": Target("score.weight")})


class MistralClassifier(LlamaClassifier):
    decoder = Mistral


class Qwen2Classifier(LlamaClassifier):
    decoder = Qwen2


class Qwen3Classifier(LlamaClassifier):
    decoder = Qwen3
