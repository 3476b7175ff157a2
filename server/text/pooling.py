"""PoolingConfig: how hidden states are pooled into one vector."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.embed import Pooling


@dataclass(frozen=True)
class PoolingConfig:
    """Pooling settings of a sentence encoder.

    `longest` is the maximum number of tokens of a text, or None if no file sets it.
    """

    mode: Pooling
    normalised: bool
    longest: int | None
    lowercase: bool
    source: str  # "modules.json", or "no modules.json"

    def __str__(self) -> str:
        length = "normalised" if self.normalised else "not normalised"
        return f"{self.mode} pooling, {length} ({self.source})"
