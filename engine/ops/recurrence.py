"""The loop over the tokens of a step that changes a state at each token: the torch reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.ops.state_runs import StateRuns

# Returns the state behind a token of the step and the token's result, for the state before it.
Step = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def recur(step: Step, states: torch.Tensor, runs: StateRuns, results: torch.Tensor) -> None:
    """Fill `results` [T, ...] token by token, and write the `states` [slots + 1, ...] of `runs`.

    Every token is a step of its own, so its bits do not depend on the runs of a step. No number is
    read on the host.
    """
    begins, reads = runs.of_tokens()
    state = states[0]
    for token in range(len(results)):
        state = torch.where(begins[token], states.index_select(0, reads[token])[0], state)
        state, results[token] = step(state, token)
        slot = runs.writes[token : token + 1]
        states.index_copy_(0, slot, torch.where(slot > 0, state, states[0])[None])
