"""Command R7B and Command A (arXiv 2504.00698): Command R with a window on three of four layers.

The layers without a window have no rotary embedding.
"""

from __future__ import annotations

from typing import Any

from engine.models.base import expect, layer_windows, nullable, positive
from engine.models.cohere import Cohere, CohereConfig

PERIOD = 4  # one layer of these has no window, if config.json has no sliding_window_pattern


class Cohere2(Cohere):
    @staticmethod
    def read_config(config: dict[str, Any]) -> CohereConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        period = positive(config, "sliding_window_pattern", PERIOD)
        if config.get("layer_types") is None:
            expect(config, "layer_switch", None, period)
            expect(config, "order_of_interleaved_layers", None, "local_attn_first")
        window = nullable(config, "sliding_window", positive)
        windows = layer_windows(config, window, lambda index: (index + 1) % period != 0)
        rotates = tuple(window is not None for window in windows)
        return CohereConfig.from_hf(config, windows=windows, rotates=rotates)
