"""StateRuns: where the recurrent layers of a step read and write the states of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from engine.ops.state_observer import StateObserver


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
    observer: StateObserver | None = field(default=None, kw_only=True)  # of a lens

    @classmethod
    def of_text(
        cls, count: int, device: torch.device, observer: StateObserver | None = None
    ) -> StateRuns:
        """Return the run of a text of `count` tokens, none of whose states is kept."""
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        return cls(torch.tensor([0, count], device=device), zeros[:1], zeros, observer=observer)

    def padded(self, missing: int) -> StateRuns:
        """Return it with `missing` tokens of padding behind the others."""
        return replace(self, writes=F.pad(self.writes, (0, missing)))

    def copy_(self, other: StateRuns) -> None:
        """Take over the runs of a step with as many runs and tokens, in the same memory."""
        self.starts.copy_(other.starts)
        self.reads.copy_(other.reads)
        self.writes.copy_(other.writes)

    def clone(self) -> StateRuns:
        """Return a copy in memory of its own."""
        return StateRuns(self.starts.clone(), self.reads.clone(), self.writes.clone())

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
