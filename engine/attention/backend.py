"""The interface between models and kernels: a backend plans a step once, then attends per layer.

The layout of a step says which tokens it computes for each sequence, and where their KV is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.kv_cache import LayerKV
from engine.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Block tables and slots of one KV group in a step.

    In a group with a window, table entries for blocks before the window are not valid: those blocks
    may belong to another sequence by now.
    """

    block_tables: torch.Tensor  # [sequences, max blocks] int64, padded with the null block
    token_blocks: torch.Tensor  # [T] int64: the block each token's KV goes to
    window: int | None = None
    # Number of keys of each sequence in a cross group, where the keys are the source's tokens.
    key_lens: Sequence[int] | None = None  # on the host; None in a captured step
    key_lengths: torch.Tensor | None = None  # [sequences] int32, on the device


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The sequences and tokens of a step, as attention needs them.

    Sequence s has seq_lens[s] tokens. The last query_lens[s] of them are new in this step. The new
    tokens of all sequences are concatenated. Sequences with one new token come first.

    A captured step is replayed with other rows later. The host knows only its shape: the numbers of
    sequences, tokens and decodes. `query_lens` and `seq_lens` are then None, and block tables have
    their full width. Tokens after those of the last sequence are padding: their results are finite
    but meaningless.
    """

    num_decodes: int  # leading sequences with exactly one new token
    query_lens: Sequence[int] | None
    seq_lens: Sequence[int] | None
    lengths: torch.Tensor  # [sequences] int32: seq_lens on the device
    query_starts: torch.Tensor  # [sequences + 1] int32: index of each sequence's first new token
    groups: Sequence[GroupLayout]
    token_offsets: torch.Tensor  # [T] int64: each token's offset in its block
    positions: torch.Tensor  # [T] int64
    block_size: int
    # Whether sequences share a block table: each has the one before, and a drafted token.
    has_drafts: bool = False
    # [T] int64: the last key that each token sees in a causal layer; None: its own. Those of a
    # sequence never decrease. A token of an image sees all of the image.
    last_keys: torch.Tensor | None = None


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

        With a spec's `value_dim`, value is None and the result [T, H, value_dim].

        Key and value are None if they are already in their slots. `store` writes those of a cross
        layer, a fused rotation writes its own, and some layers read the KV of an earlier one.
        `kv` is None for a layer without a KV cache, which attends only to the tokens of each
        sequence in this step. `bias` is the table [buckets, H] of a spec with `relative`, and
        `sinks` [H] belongs to one with `has_sinks`.
        """

    def store(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor | None) -> None:
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
