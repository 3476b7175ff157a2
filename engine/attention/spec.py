"""AttentionSpec: the frozen facts of one layer's attention, written in the model file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must honour, or refuse at start.

    `window` counts visible keys including the query's own: position p sees keys p - window + 1
    to p. `softcap` c turns a score s into c * tanh(s / c), before the mask.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "query heads share kv heads evenly"
        assert self.window is None or self.window >= 1
