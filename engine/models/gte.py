"""GTE (arXiv 2407.19669), in the layout of transformers: BERT with rotary positions and GeGLU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import Names
from engine.layers.classification_head import ClassificationHead
from engine.models.base import expect, label_count, positive
from engine.models.bert import TANH
from engine.models.nomic_bert import RotaryBert, RotaryBertConfig

BLOCK = "encoder.layer.{i}"
NAMES_GTE: Names = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "blocks.{i}.qkv": f"{BLOCK}.attention.qkv_proj",
    "blocks.{i}.out": f"{BLOCK}.attention.o_proj",
    "blocks.{i}.attention_norm": f"{BLOCK}.attn_ln",
    "blocks.{i}.mlp.up": dict.fromkeys(("up", "gate"), f"{BLOCK}.mlp.up_gate_proj"),
    "blocks.{i}.mlp.down": f"{BLOCK}.mlp.down_proj",
    "blocks.{i}.mlp_norm": f"{BLOCK}.mlp_ln",
}


class Gte(RotaryBert):
    names = NAMES_GTE
    prefixes = ("gte.", "new.")
    heads = ("lm_head.",)

    @staticmethod
    def read_config(config: dict[str, Any]) -> RotaryBertConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        The code that trained GTE has more variants, with keys that transformers does not read.
        """
        expect(config, "layer_norm_type", "layer_norm")
        expect(config, "logn_attention_scale", False)
        has_types = config.get("type_vocab_size") != 0
        return RotaryBertConfig.from_hf(
            config,
            theta=160_000.0,
            gated=True,
            up_bias=False,
            token_types=positive(config, "type_vocab_size") if has_types else None,
        )


class GteClassifier(Gte):
    """GTE with a head that reads the first token."""

    names: ClassVar[Names] = {**NAMES_GTE, "head.dense": "pooler.dense", "head.out": "classifier"}
    head_pooling: PoolingMode = "cls"
    passed_over = None

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.num_labels = label_count(config)
        self.head = ClassificationHead(self.config.hidden, self.num_labels, TANH)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)
