"""The seam between models and kernels: a backend plans a step once, then attends layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where one KV group keeps the keys of a step's sequences and puts those of its tokens.

    Behind a window, entries of the tables are of no meaning: those blocks may be another's.
    """

    block_tables: torch.Tensor  # [sequences, max blocks] int64, padded with the null block
    token_blocks: torch.Tensor  # [T] int64: the block each token's KV goes to
    window: int | None = None
    # Keys of each sequence, where they are not its tokens but the source's (cross): on the host,
    # absent from a captured step, and on the device.
    key_lens: Sequence[int] | None = None
    key_lengths: torch.Tensor | None = None  # [sequences] int32


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens of which sequences a step computes, as the attention sees it.

    Sequence s has query_lens[s] new tokens, the last of its seq_lens[s]; the tokens of all
    sequences lie one after another. Sequences with one new token come first.

    A captured step is replayed with other rows later, so only its shape is known to the host: how
    many sequences and tokens there are, and how many decodes. `query_lens` and `seq_lens` are None,
    block tables have their whole width, and tokens behind the last sequence's belong to none: what
    is computed for them is finite, and means nothing.
    """

    num_decodes: int  # sequences before the first that has not just one new token
    query_lens: Sequence[int] | None
    seq_lens: Sequence[int] | None
    lengths: torch.Tensor  # [sequences] int32: seq_lens on the device
    query_starts: torch.Tensor  # [sequences + 1] int32: where the new tokens of each begin
    groups: Sequence[GroupLayout]
    token_offsets: torch.Tensor  # [T] int64: each token's place in its block
    positions: torch.Tensor  # [T] int64
    block_size: int

    def slots(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and place in it, [T] int64 each, of the step's tokens in a KV group."""
        return self.groups[group].token_blocks, self.token_offsets


class AttentionPlan(Protocol):
    """What a backend prepared for one step."""

    layout: StepLayout

    def attend(
        self,
        spec: AttentionSpec,
        kv: LayerKV | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store key and value [T, Hkv, D] in their slots, attend; query and result [T, H, D].

        Keys and values that are in their slots already are not given: `store` has put a cross
        layer's there, a fused rotation its own. A layer without KV gives None for it, and attends
        to what the step itself holds of each sequence. `bias` is the table [buckets, H] of a spec
        with `relative`.
        """

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write key and value [T, Hkv, D] of the step's tokens."""


class AttentionBackend(Protocol):
    """A family of kernels over the paged cache."""

    name: str
    # Whether a captured step costs what its sequences' lengths ask for, not the tables' width.
    captures: bool
    # Whether it reads keys that it then masks: NaN there would pass any mask, as 0 * NaN.
    reads_masked: bool

    def refuses(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        """Why this layer cannot be honoured, or None."""

    def plan(self, layout: StepLayout) -> AttentionPlan:
        """Once per step, before the first layer."""
