"""The interface between models and kernels: a backend plans a step once, then attends per layer."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.layout import StepLayout
from engine.attention.spec import AttentionSpec


class AttentionPlan(Protocol):
    """The state that a backend prepared for one step."""

    layout: StepLayout

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store key and value [T, Hkv, D] in their slots and attend; query and result [T, H, D].

        Key and value are None if they are already in their slots. `store` writes those of a cross
        layer, and a fused rotation writes its own. `kv` is None for a layer without a KV cache,
        which attends only to the tokens of each sequence in this step. `bias` is the table
        [buckets, H] of a spec with `relative`, and `sinks` [H] belongs to one with `has_sinks`.
        """

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [T, Hkv, D] of the step's tokens into their slots."""


class AttentionBackend(Protocol):
    """A family of attention kernels over the paged KV cache."""

    name: str
    # Whether the cost of a captured step depends on sequence lengths, not on the tables' width.
    supports_capture: bool
    # Whether it reads keys that it then masks. NaN in such a key would pass the mask, as 0 * NaN.
    reads_masked_keys: bool
    # Whether it stores the keys of one head in a block as [head_dim, block_size].
    transposes_keys: bool

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        """Return the reason why this backend does not support the layer, or None if it does."""

    def plan(self, layout: StepLayout) -> AttentionPlan:
        """Prepare a step. Called once per step, before the first layer."""
