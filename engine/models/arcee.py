"""Arcee Foundation Models (Arcee AI, 2025): Llama with a plain MLP, whose activation is relu²."""

from __future__ import annotations

from typing import Any

from engine.models.llama import NAMES, Llama, LlamaConfig


class Arcee(Llama):
    names = NAMES | {"blocks.{i}.mlp.up": "model.layers.{i}.mlp.up_proj"}

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return LlamaConfig.from_hf({"hidden_act": "relu2"} | config, gated=False)
