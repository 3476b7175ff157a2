"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on queries, keys and values.

Later layers may slide; released checkpoints have that switched off.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.models.base import layer_windows, nullable, positive
from engine.models.llama import Llama, LlamaConfig

DENSE_LAYERS = 28  # that see everything before those that slide, where config.json does not say


def qwen_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows as Qwen2 and Qwen3 configs state them: `sliding_window` means nothing by itself."""
    slides = config.get("use_sliding_window", False)
    window = nullable(config, "sliding_window", positive) if slides else None
    dense = config.get("max_window_layers", DENSE_LAYERS)
    if type(dense) is not int:
        raise ConfigError(f"config.json has max_window_layers = {dense!r}; it must be a number.")
    return layer_windows(config, window, lambda i: window is not None and i >= dense)


class Qwen2(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        own = {"windows": qwen_windows(config), "qkv_bias": True, "out_bias": False}
        return LlamaConfig.from_hf(config, **own)
