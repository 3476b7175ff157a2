"""StateRuns: where the recurrent layers of a step read and write the states of its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The T tokens of a step as R runs; a run is consecutive tokens of one sequence.

    A layer keeps its states in tensors [slots + 1, ...]. Slot 0 is always zero: it is the state
    before a sequence's first token, and is never written. Within a step no slot is written by one
    run and read or written by another. A run may write the slot that it has read.

    All tensors are on the device, so that a step can be captured. Runs may be empty. Tokens behind
    the last run are padding: they write nothing, and their results are finite.
    """

    starts: torch.Tensor  # [R + 1] int64: the first token of each run, and the end of the last
    reads: torch.Tensor  # [R] int64: the slot with the state before each run
    writes: torch.Tensor  # [T] int64: the slot that gets the state behind each token; 0: none

    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each token begins a run [T], and the slot that its run reads [T, 1].

        Padding begins a run each, and reads slot 0.
        """
        tokens = torch.arange(len(self.writes), device=self.starts.device)
        number = torch.searchsorted(self.starts, tokens, right=True) - 1
        is_padding = tokens >= self.starts[-1]
        begins = is_padding | (self.starts.index_select(0, number) == tokens)
        reads = torch.cat([self.reads, self.reads.new_zeros(1)]).index_select(0, number)
        return begins, reads.unsqueeze(1)
