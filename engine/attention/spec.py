"""AttentionSpec: the frozen facts of one layer's attention, written in the model file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """T5's bias on scores by the bucket of the distance key - query (arXiv 1910.10683).

    Half of the buckets are exact, the others grow logarithmically up to `max_distance`.
    """

    num_buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must honour, or refuse at start.

    `causal` layers see their own sequence up to the query; `full` ones, of an encoder, all of it,
    and keep no KV; `cross` ones the source, whose KV the encoder's pass has written. `window`
    counts visible keys including the query's own: position p sees keys p - window + 1 to p.
    `softcap` c turns a score s into c * tanh(s / c), before the mask.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kind: Literal["causal", "full", "cross"] = "causal"
    window: int | None = None
    softcap: float | None = None
    relative: RelativeBias | None = None

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "query heads share kv heads evenly"
        assert self.window is None or (self.window >= 1 and self.kind == "causal")
        assert self.relative is None or self.window is None
