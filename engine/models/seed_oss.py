"""Seed-OSS (ByteDance, 2025): Llama with biases on queries, keys and values, or on the output."""

from __future__ import annotations

from typing import Any

from engine.models.llama import Llama, LlamaConfig

DEFAULTS = {"head_dim": 128, "attention_bias": True}


class SeedOss(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        out_bias = bool(config.get("attention_out_bias", False))
        return LlamaConfig.from_hf(DEFAULTS | config, out_bias=out_bias)
