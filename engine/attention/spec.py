"""AttentionSpec: the fixed parameters of one layer's attention, declared in the model's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """T5's relative bias: added to a score by the bucket of key - query (arXiv 1910.10683).

    Half of the buckets hold one distance each; the others grow logarithmically to `max_distance`.
    """

    num_buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention that a backend must compute, or reject at startup.

    `kind` is the set of visible keys. A `causal` layer sees its own sequence up to the query. A
    `full` layer (in encoders) sees its whole sequence and has no KV cache. A `cross` layer sees the
    source, whose KV the encoder's pass has already written. `window` is the number of visible keys,
    including the query's own: position p sees keys p - window + 1 to p, and in a full layer also
    the window - 1 keys after p. `softcap` c replaces a score s by c * tanh(s / c) before the mask.
    With `has_sinks` each head has a learned score that takes part in the softmax like that of a
    further key, whose value is 0 (arXiv 2309.17453).

    With `sees_whole_images` the tokens of an image see all of it in a causal layer, also what is
    behind them. A window hides only what is before it.

    With `value_dim` there are no values in the cache: a key's first `value_dim` numbers are its
    value (multi-head latent attention, arXiv 2405.04434).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kind: Literal["causal", "full", "cross"] = "causal"
    window: int | None = None
    softcap: float | None = None
    relative: RelativeBias | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    sees_whole_images: bool = False

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "num_heads % num_kv_heads must be 0"
        assert self.window is None or (self.window >= 1 and self.kind != "cross")
        assert self.relative is None or self.window is None
        assert not self.has_sinks or self.kind == "causal"
        assert self.value_dim is None or (self.kind == "causal" and self.value_dim <= self.head_dim)

        assert not self.sees_whole_images or self.kind == "causal"

    @property
    def result_dim(self) -> int:
        """The numbers of a head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim
