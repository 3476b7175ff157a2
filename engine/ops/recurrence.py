"""The loop over the tokens of a step that changes a state at each token: the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.ops.state_runs import StateRuns


class Stepped(NamedTuple):
    """The change that one token makes to the state of its sequence."""

    state: torch.Tensor  # [heads, ...], behind the token
    result: torch.Tensor
    strength: torch.Tensor  # [heads]: the factor on what the token writes
    decay: torch.Tensor  # [heads]: the factor on the state before the token


# Takes the state before a token of the step, and the token's number.
Step = Callable[[torch.Tensor, int], Stepped]


def recur(step: Step, states: torch.Tensor, runs: StateRuns, results: torch.Tensor) -> None:
    """Fill `results` [T, ...] token by token, and write the `states` [slots + 1, ...] of `runs`.

    Every token is a step of its own, so its bits do not depend on the runs of a step. No number is
    read on the host.
    """
    begins, reads = runs.of_tokens()
    state = states[0]
    for token in range(len(results)):
        state = torch.where(begins[token], states.index_select(0, reads[token])[0], state)
        stepped = step(state, token)
        state, results[token] = stepped.state, stepped.result
        if runs.observer is not None:
            runs.observer.note_step(states, state, stepped.strength, stepped.decay)
        slot = runs.writes[token : token + 1]
        states.index_copy_(0, slot, torch.where(slot > 0, state, states[0])[None])
