"""Jina Embeddings v3 (arXiv 2409.10173), in the layout of transformers: BERT with rotary positions.

The adapters of its tasks are not read.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.weight_map import Names
from engine.models.nomic_bert import NAMES_NOMIC, RotaryBert, RotaryBertConfig

NAMES_JINA: Names = {
    **NAMES_NOMIC,
    "blocks.{i}.qkv": "encoder.layers.{i}.mixer.Wqkv",
    "blocks.{i}.out": "encoder.layers.{i}.mixer.out_proj",
    "blocks.{i}.mlp.up": "encoder.layers.{i}.mlp.fc1",
}


class JinaV3(RotaryBert):
    names = NAMES_JINA
    prefixes = ("roberta.",)
    heads = ("lm_head.",)

    @staticmethod
    def read_config(config: dict[str, Any]) -> RotaryBertConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return RotaryBertConfig.from_hf(config, theta=20_000.0)
