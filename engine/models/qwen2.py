"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on queries, keys and values.

Later layers may have a sliding window; released checkpoints switch it off.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.models.base import layer_windows, nullable, positive
from engine.models.llama import Llama, LlamaConfig

DENSE_LAYERS = 28  # layers with full attention, if config.json has no max_window_layers


def qwen_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window for a Qwen2 or Qwen3 config; None means full attention.

    `sliding_window` has no effect unless `use_sliding_window` is true.
    """
    slides = config.get("use_sliding_window", False)
    window = nullable(config, "sliding_window", positive) if slides else None
    dense = config.get("max_window_layers", DENSE_LAYERS)
    if type(dense) is not int:
        raise ConfigError(f"config.json has max_window_layers = {dense!r}; it must be an integer.")
    return layer_windows(config, window, lambda i: window is not None and i >= dense)


class Qwen2(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        own = {"windows": qwen_windows(config), "qkv_bias": True, "out_bias": False}
        return LlamaConfig.from_hf(config, **own)
