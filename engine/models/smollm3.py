"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer has no rotary embedding.

Such layers may have a sliding window; the released checkpoint has none.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.models.base import layer_count, layer_windows, nullable, positive
from engine.models.llama import Llama, LlamaConfig

INTERVAL = 4  # between layers without rotary, if config.json has no no_rope_layer_interval
THETA = 2e6  # if config.json has no rope_theta


def rotating_layers(config: dict[str, Any]) -> tuple[bool, ...]:
    """Return whether each layer rotates: 1 and 0 in `no_rope_layers`, which has this meaning.

    Raises ConfigError if the list is malformed.
    """
    layers = layer_count(config)
    given = config.get("no_rope_layers")
    if given is None:
        interval = positive(config, "no_rope_layer_interval", INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    is_list = isinstance(given, list) and len(given) >= layers
    if not is_list or any(value not in (0, 1) for value in given):
        raise ConfigError(
            f"config.json has no_rope_layers = {given!r}; it must be a list with 1 (rotary) or 0 "
            f"(none) for each of {layers} layers."
        )
    return tuple(bool(value) for value in given[:layers])


class SmolLM3(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        rotates = rotating_layers(config)
        window = None
        if config.get("use_sliding_window", False):
            window = nullable(config, "sliding_window", positive)
        windows = layer_windows(config, window, lambda i: window is not None and not rotates[i])
        defaults = {"rope_theta": THETA, "tie_word_embeddings": True}
        return LlamaConfig.from_hf(defaults | config, windows=windows, rotates=rotates)
