"""Low-rank adapters (LoRA, arXiv 2106.09685) of a linear layer: y + B A x with each token's own.

Adapters lie in slots, which count from 1. Slot 0 stands for no adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from engine.ops.kernels import Kernels


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The tokens of a batch that use one adapter."""

    slot: int
    count: int
    # [n] int64 with the last token repeated behind `count`; None: all tokens of the batch.
    tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """The slot of each token of a batch. A CPU also gets the tokens by slot."""

    slots: torch.Tensor  # [T] int32
    groups: tuple[AdapterGroup, ...] = ()

    def padded(self, missing: int) -> Self:
        """Return it with `missing` more tokens, without an adapter."""
        return replace(self, slots=F.pad(self.slots, (0, missing)))


class Parts(NamedTuple):
    """The output rows of a layer's parts, which follow each other."""

    rows: tuple[slice, ...]
    starts: torch.Tensor  # [parts + 1] int32: where each begins, and where the last one ends

    @classmethod
    def of(cls, rows: Iterable[slice], device: torch.device) -> Parts:
        rows = tuple(rows)
        starts = [*(part.start for part in rows), rows[-1].stop]
        return cls(rows, torch.tensor(starts, dtype=torch.int32, device=device))


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    parts: Parts,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return y + B A x [T, out] for x [T, in] and slots [T] int32; may write to y.

    Each part of the output rows has its own A: `a` is [S, parts * rank, in], `b` [S, out, rank].
    """
    if kernels == "triton":
        from engine.kernels.triton.lora import add_low_rank

        return add_low_rank(x, y, a, b, slots, parts.starts)
    num_slots, rank = len(a), b.shape[2]
    shrunk = F.linear(x, a.flatten(0, 1)).view(len(x), num_slots, -1)
    numbers = torch.arange(1, num_slots + 1, device=slots.device)
    is_own = slots[:, None] == numbers
    shrunk = torch.where(is_own[..., None], shrunk, 0)
    added = []
    for index, rows in enumerate(parts.rows):
        own = shrunk[..., index * rank : (index + 1) * rank].flatten(1)
        added.append(own @ b[:, rows].transpose(1, 2).flatten(0, 1))
    return y + torch.cat(added, 1)
