"""DistilBERT (arXiv 1910.01108): BERT without token types, under other names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import Names
from engine.layers.classification_head import ClassificationHead
from engine.layers.mlp import ACTIVATIONS
from engine.models.base import expect, label_count, layer_count, positive, shared_by
from engine.models.bert import NAMES, Bert, BertConfig

BLOCK = "transformer.layer.{i}"
PARTS = {"query": "q_lin", "key": "k_lin", "value": "v_lin"}
NAMES_DISTILBERT: Names = {
    **NAMES,
    "blocks.{i}.qkv": {part: f"{BLOCK}.attention.{name}" for part, name in PARTS.items()},
    "blocks.{i}.out": f"{BLOCK}.attention.out_lin",
    "blocks.{i}.attention_norm": f"{BLOCK}.sa_layer_norm",
    "blocks.{i}.mlp.up": f"{BLOCK}.ffn.lin1",
    "blocks.{i}.mlp.down": f"{BLOCK}.ffn.lin2",
    "blocks.{i}.mlp_norm": f"{BLOCK}.output_layer_norm",
}
NORM_EPS = 1e-12


class DistilBert(Bert):
    names = NAMES_DISTILBERT
    prefixes = ("distilbert.",)
    heads = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")

    @staticmethod
    def read_config(config: dict[str, Any]) -> BertConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        `sinusoidal_pos_embds` says how the table of positions was made, which every file has.
        """
        expect(config, "activation", *ACTIVATIONS)
        hidden, heads = shared_by(config, "dim", "n_heads")
        spelled = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": layer_count(config, "n_layers"),
            "intermediate_size": positive(config, "hidden_dim"),
            "hidden_act": config.get("activation", "gelu"),
            "layer_norm_eps": NORM_EPS,
        }
        return BertConfig.from_hf(config | spelled, token_types=None)


class DistilBertClassifier(DistilBert):
    """DistilBERT with a head that reads the first token."""

    names: ClassVar[Names] = {
        **NAMES_DISTILBERT,
        "head.dense": "pre_classifier",
        "head.out": "classifier",
    }
    head_pooling: PoolingMode = "cls"
    passed_over = None

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.num_labels = label_count(config)
        self.head = ClassificationHead(self.config.hidden, self.num_labels, ACTIVATIONS["relu"])

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)
