"""The interface of plans that do more than attend: layers use it where a plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec
from engine.ops.rotary import Rotation


@runtime_checkable
class FusedPlan(Protocol):
    """A plan of a backend that may also norm, rotate and store, in the launch that attends."""

    def fuses(self, spec: AttentionSpec, kv: LayerKV) -> bool:
        """Return whether `rotate_and_attend` computes this layer: the same in each step."""

    def rotate_and_attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        qk: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
        next_weights: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Norm, rotate and store the keys of `qk` [T, H + Hkv, D], and attend as `attend` does.

        While attention leaves a part of the device idle, the start of `next_weights` may be
        fetched into its cache.
        """
