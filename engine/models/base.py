"""The Model protocol: what the runner asks of every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.errors import ConfigError
from engine.weights.rules import WeightMap


class Model(Protocol):
    """A model over ragged tokens. Built on the meta device from a Hugging Face config.

    Every implementation is an nn.Module with `__init__(config, *, max_positions, dtype)`, where
    `max_positions` is how many positions will be served. A decoder has `forward` and `logits`, an
    encoder `encode`, an encoder–decoder all three; the registry says which it is.
    """

    specs: Sequence[AttentionSpec]  # one for each layer with KV, at its Attention's index
    vocab_size: int

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden] of whole texts; writes the KV of cross layers."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden] of all tokens, after the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden] -> [L, vocab_size] in fp32."""

    def weight_map(self) -> WeightMap: ...


def required(config: dict[str, Any], key: str) -> Any:
    """config[key], or a ConfigError naming the key."""
    if config.get(key) is None:
        raise ConfigError(f"config.json lacks {key!r}, which this architecture needs.")
    return config[key]


def positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """config[key], else the default, else a ConfigError; also where it is no count above zero."""
    value = config.get(key)
    if value is None:
        value = required(config, key) if default is None else default
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json has {key} = {value!r}; it must be a whole number above 0.")
    return value


def positive_float(config: dict[str, Any], key: str) -> float:
    """config[key] as a number above zero, else a ConfigError."""
    value = required(config, key)
    if type(value) not in (int, float) or not value > 0:
        raise ConfigError(f"config.json has {key} = {value!r}; it must be a number above 0.")
    return float(value)


def expect(config: dict[str, Any], key: str, *allowed: Any) -> None:
    """ConfigError where a config asks for a variant this model file does not compute."""
    if key in config and config[key] not in allowed:
        raise ConfigError(
            f"config.json has {key} = {config[key]!r}; this architecture is served with "
            f"{' or '.join(repr(a) for a in allowed)} only."
        )
