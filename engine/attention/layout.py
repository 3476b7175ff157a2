"""The layout of a step: the tokens that it computes for each sequence, and where their KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
