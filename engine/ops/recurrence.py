"""The loop over the tokens of a step that changes a state at each token: the torch reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.ops.state_runs import StateRuns

# Returns the state behind a token of the step and the token's result, for the state before it.
Step = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def recur(step: Step, states: torch.Tensor, runs: StateRuns, results: torch.Tensor) -> None:
    """Fill `results` [T, ...] token by token, and write the `states` [slots + 1, ...] of `runs`.

    Every token is a step of its own, so its bits do not depend on the runs of a step.
    """
    starts, reads, writes = runs.starts.tolist(), runs.reads.tolist(), runs.writes.tolist()
    for run, read in enumerate(reads):
        state = states[read].clone()
        for token in range(starts[run], starts[run + 1]):
            state, results[token] = step(state, token)
            if writes[token]:
                states[writes[token]] = state
