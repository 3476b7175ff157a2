"""SequenceRows: what the device knows of running sequences, one row each.

The host sends a sequence's tokens once and its blocks as it gets them; inputs of a step are
gathered here by row, and sampled tokens are written here, without a trip over the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.protocol import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.scheduling.step import NewBlocks, NewRow


class SequenceRows:
    """State of up to `max_num_seqs` rows of up to `max_model_len` tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        shape = num_groups, max_num_seqs, -(-max_model_len // block_size)
        self.tokens = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device)
        # Entry 0 everywhere is the null block: what is not yet allocated is padding.
        self.block_tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self.params: list[SamplingParams] = [SamplingParams(max_tokens=1)] * max_num_seqs
        self.prompt_length: list[int] = [0] * max_num_seqs
        self.source_length: list[int] = [0] * max_num_seqs

    def apply(self, rows: Iterable[NewRow], blocks: Iterable[NewBlocks]) -> None:
        """Write new rows and appended blocks, before the step that reads them."""
        for new in rows:
            tokens = torch.tensor(new.tokens, dtype=torch.int32)
            self.tokens[new.row, : len(new.tokens)] = tokens.to(self.tokens.device)
            self.block_tables[:, new.row] = 0
            self.params[new.row] = new.params
            self.prompt_length[new.row] = new.prompt_length
            self.source_length[new.row] = new.source_length
        for added in blocks:
            ids = torch.tensor(added.blocks, dtype=torch.int64)
            end = added.first + len(added.blocks)
            table = self.block_tables[added.group, added.row]
            table[added.first : end] = ids.to(table.device)

    def sampling_row(self, row: int, position: int) -> SamplingRow:
        """`row` about to sample the token at `position`."""
        return SamplingRow(self.params[row], self.tokens[row, :position], self.prompt_length[row])

    def append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write sampled tokens [R] at `positions` [R] of `rows` [R]."""
        # INVALID is no index: a step launched before the host knows of it looks this token up.
        self.tokens[rows, positions] = tokens.clamp(min=0).to(torch.int32)
