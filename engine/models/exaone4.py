"""EXAONE 4 (arXiv 2507.11407): norms after the sublayers as in OLMo 2, and norms of each head.

The 32B model mixes layers with a sliding window, which alone have rotary embedding, and global
layers. The 1.2B model has no window, and rotary embedding in all layers.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.models.base import expect, layer_count, layer_windows, nullable, positive
from engine.models.llama import LlamaConfig, llama_attention
from engine.models.olmo2 import Olmo2, Olmo2Block

PATTERN = 4  # if config.json has no sliding_window_pattern
LOCAL, GLOBAL = "L", "G"  # layers in a sliding_window_pattern that is a text


def exaone_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window; None means full attention.

    Configs without `layer_types` have `sliding_window_pattern`: the distance of global layers, or
    letters that repeat, with a global last layer. Raises ConfigError if it is malformed.
    """
    window = nullable(config, "sliding_window", positive)
    pattern = config.get("sliding_window_pattern", PATTERN)
    last = layer_count(config) - 1
    if window is None or config.get("layer_types") is not None:
        return layer_windows(config, window, lambda i: False)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {LOCAL, GLOBAL}:
            raise ConfigError(
                f"config.json has sliding_window_pattern = {pattern!r:.99}; letters must be "
                f"{LOCAL} or {GLOBAL}."
            )
        letters = pattern
        return layer_windows(
            config, window, lambda i: i != last and letters[i % len(letters)] == LOCAL
        )
    period = positive(config, "sliding_window_pattern", PATTERN)
    return layer_windows(config, window, lambda i: (i + 1) % period != 0)


class Exaone4Block(Olmo2Block):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention = llama_attention(config, index)


class Exaone4(Olmo2):
    block = Exaone4Block

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        for key in ("attention_bias", "mlp_bias"):
            expect(config, key, None, False)
        windows = exaone_windows(config)
        has_window = config.get("sliding_window") is not None
        return LlamaConfig.from_hf(
            config,
            windows=windows,
            rotates=tuple(not has_window or window is not None for window in windows),
            qk_norm=True,
        )
