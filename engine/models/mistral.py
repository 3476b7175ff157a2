"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window on every layer.

Models from v0.2 on have no window.
"""

from __future__ import annotations

from typing import Any

from engine.models.base import expect, layer_count, nullable, positive
from engine.models.llama import Llama, LlamaConfig


class Mistral(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        `layer_types` is refused, because the reference ignores it.
        """
        expect(config, "layer_types", None)
        windows = [nullable(config, "sliding_window", positive)]
        windows *= layer_count(config)
        return LlamaConfig.from_hf(config, windows=tuple(windows))
