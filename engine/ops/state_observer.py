"""StateObserver: what recurrent layers keep behind each token of a text, for a lens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class ObservedState:
    """One layer's state behind each token: tensors [heads] in fp32, a list item for each token."""

    norms: list[torch.Tensor] = field(default_factory=list)
    strengths: list[torch.Tensor] = field(default_factory=list)  # empty without gates
    decays: list[torch.Tensor] = field(default_factory=list)  # empty without gates


class StateObserver:
    """Notes how the torch references of recurrent ops change some states.

    `states` are the tensors that an op gets; others pass without a note. The caller keeps them
    alive. The tokens are those of one run, in their order.
    """

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        self._found = {id(state): ObservedState() for state in states}

    def of(self, states: torch.Tensor) -> ObservedState:
        """Return what has been noted of one of the states."""
        return self._found[id(states)]

    def note_step(
        self,
        states: torch.Tensor,
        state: torch.Tensor,
        strength: torch.Tensor,
        decay: torch.Tensor,
    ) -> None:
        """Note the `state` [heads, ...] behind the next token, and its gates [heads]."""
        found = self._found.get(id(states))
        if found is None:
            return
        found.norms.append(state.float().flatten(1).norm(dim=1))
        found.strengths.append(strength)
        found.decays.append(decay)

    def note_inputs(self, tails: torch.Tensor, kept: torch.Tensor) -> None:
        """Note the inputs `kept` [T, ...] behind each token, as those of one head."""
        found = self._found.get(id(tails))
        if found is not None:
            found.norms += kept.float().flatten(1).norm(dim=1, keepdim=True)
