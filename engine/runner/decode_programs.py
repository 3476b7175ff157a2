"""DecodePrograms: the forward pass of few decodes, recorded once per number of sequences.

With few rows, a step's Python and its parallel regions take as long as reading the weights. A
recorded pass has one region and no Python (`engine/ops/program.py`). Its bits are the same, because
the kernels and their arguments are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.attention.batch import ForwardBatch
from engine.attention.numba import NumbaBackend, NumbaPlan
from engine.device.openmp_wait import OpenMPWait
from engine.ops.lora import TokenAdapters
from engine.ops.program import Replay, record

MOST_SEQUENCES = 8  # with more, oneDNN multiplies, which is no kernel of ours
Forward = Callable[[ForwardBatch], torch.Tensor]


class DecodePrograms:
    """Computes batches of decodes of one model, with block tables of up to `blocks` blocks.

    Threads of a program spin while they wait. While cores are scarce, none runs.
    """

    def __init__(
        self,
        forward: Forward,
        backend: NumbaBackend,
        blocks: int,
        openmp_wait: OpenMPWait,
    ) -> None:
        self._forward = forward
        self._openmp_wait = openmp_wait
        self._backend = backend
        self._blocks = blocks
        # By number of sequences, and whether some have adapters. None: the model computes something
        # that cannot be replayed.
        self._replays: dict[tuple[int, bool], tuple[ForwardBatch, Replay] | None] = {}

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states [T, hidden], valid until the next call."""
        count = batch.num_tokens
        if batch.adapters is not None and batch.adapters.groups:  # other tensors in each step
            return self._forward(batch)
        if (
            self._openmp_wait.contended
            or count > MOST_SEQUENCES
            or batch.plan.layout.num_decodes < count
        ):
            return self._forward(batch)
        key = count, batch.adapters is not None
        if key not in self._replays:
            self._replays[key], result = self._record(batch)
            return result
        known = self._replays[key]
        if known is None:
            return self._forward(batch)
        own, replay = known
        _copy_inputs(own, batch)
        return replay()

    def _record(
        self, batch: ForwardBatch
    ) -> tuple[tuple[ForwardBatch, Replay] | None, torch.Tensor]:
        """Compute once. Return the inputs of the replay with it, and the result."""
        adapters, runs = batch.adapters, batch.runs
        own = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            plan=self._backend.followed_plan(batch.plan.layout, self._blocks),
            adapters=None if adapters is None else TokenAdapters(adapters.slots.clone()),
            runs=None if runs is None else runs.clone(),
        )
        _copy_inputs(own, batch)
        result, replay = record(lambda: self._forward(own))
        return None if replay is None else (own, replay), result


def _copy_inputs(own: ForwardBatch, batch: ForwardBatch) -> None:
    own.input_ids.copy_(batch.input_ids)
    own.positions.copy_(batch.positions)
    if own.adapters is not None and batch.adapters is not None:
        own.adapters.slots.copy_(batch.adapters.slots)
    if own.runs is not None and batch.runs is not None:
        own.runs.copy_(batch.runs)
    assert isinstance(own.plan, NumbaPlan)
    assert isinstance(batch.plan, NumbaPlan)
    own.plan.follow(batch.plan)
