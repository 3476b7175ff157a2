"""Qwen3, dense (arXiv 2505.09388): Llama with a norm on each head's query and key before rotary."""

from __future__ import annotations

from typing import Any

from engine.models.llama import Llama, LlamaConfig
from engine.models.qwen2 import qwen_windows

HEAD_DIM = 128  # if config.json has no head_dim; never hidden / heads


class Qwen3(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        windows = qwen_windows(config)
        return LlamaConfig.from_hf({"head_dim": HEAD_DIM} | config, windows=windows, qk_norm=True)
