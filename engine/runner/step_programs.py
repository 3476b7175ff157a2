"""StepPrograms: the forward pass of a step, recorded once per number of tokens.

A recorded pass has one parallel region and no Python (`engine/ops/program.py`), and its tensors
stay in memory that is already touched. Its bits are the same, because the kernels and their
arguments are. Decodes and prompt chunks may be mixed in any way: only the tasks of attention
differ, and each step writes its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.attention.batch import ForwardBatch
from engine.attention.numba import NumbaBackend, NumbaPlan
from engine.attention.numba_tasks import PlanMemory
from engine.device.openmp_wait import OpenMPWait
from engine.kernels.numba.call import AttentionCall
from engine.kernels.numba.program import load_program_kernel
from engine.memory.estimate import PROGRAM_ROWS, PROGRAMS
from engine.ops.arena import Arena
from engine.ops.lora import TokenAdapters
from engine.ops.program import Replay, record
from engine.runner.forward import FEW_TOKENS, STEP_TOKENS_MULTIPLE, ModelForward

RECORDED_AT = 2  # a shape is recorded when it comes for the second time


class Shape(NamedTuple):
    """The properties of a step that its kernels and their arguments depend on."""

    rows: int
    has_adapters: bool


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A recorded pass, its inputs, and its arguments that depend on a step's tasks."""

    batch: ForwardBatch
    plan: NumbaPlan
    replay: Replay
    attention: list[AttentionCall]

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        _copy_inputs(self.batch, batch)
        for call in self.attention:
            self.plan.set_counts(call)
        return self.replay()


class StepPrograms:
    """Computes steps of one model, with block tables of up to `blocks` blocks.

    All programs share the memory of their inputs and of their tensors. This is safe: one runs at a
    time, and a step is done with its hidden states when the next one begins.

    Threads of a program spin while they wait. While cores are scarce, none runs.
    """

    def __init__(
        self,
        forward: ModelForward,
        backend: NumbaBackend,
        blocks: int,
        openmp_wait: OpenMPWait,
    ) -> None:
        load_program_kernel()  # nothing is compiled while serving
        self._forward = forward
        self._openmp_wait = openmp_wait
        self._backend = backend
        self._blocks = blocks
        self._arena = Arena()
        self._memory: PlanMemory | None = None  # None: nothing was recorded yet
        self._input_ids = torch.zeros(PROGRAM_ROWS, dtype=torch.int64)
        self._positions = torch.zeros(PROGRAM_ROWS, dtype=torch.int64)
        self._slots = torch.zeros(PROGRAM_ROWS, dtype=torch.int32)
        self._steps: Counter[Shape] = Counter()  # of shapes without a program
        # The last used is last. None: the model computes something that cannot be replayed.
        self._programs: dict[Shape, StepProgram | None] = {}

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states [T, hidden], valid until the next call."""
        shape = self._shape(batch)
        if shape is None or self._openmp_wait.contended:
            return self._forward(batch)
        if shape in self._programs:
            program = self._programs.pop(shape)
            self._programs[shape] = program
            return self._forward(batch) if program is None else program(batch)
        self._steps[shape] += 1
        if self._steps[shape] < RECORDED_AT:
            return self._forward(batch)
        del self._steps[shape]
        return self._record(shape, batch)

    def _shape(self, batch: ForwardBatch) -> Shape | None:
        """Return what a program for the batch depends on, or None if there is none."""
        assert isinstance(batch.plan, NumbaPlan)
        if batch.adapters is not None and batch.adapters.groups:  # other tensors in each step
            return None
        if batch.plan.fuses_chunks:  # by torch
            return None
        if batch.seen is not None:
            return None
        count = batch.num_tokens
        if batch.runs is not None and batch.plan.layout.num_decodes < count:
            return None
        if count > (PROGRAM_ROWS if batch.runs is None else FEW_TOKENS):
            return None
        rows = self._forward.round_up(count, STEP_TOKENS_MULTIPLE)
        return Shape(rows, batch.adapters is not None)

    def _record(self, shape: Shape, batch: ForwardBatch) -> torch.Tensor:
        """Compute once, keep the program, and return the result."""
        if len(self._programs) == PROGRAMS:
            del self._programs[next(iter(self._programs))]
        own, plan = self._inputs(shape, batch)
        _copy_inputs(own, batch)
        result, replay = record(lambda: self._forward(own), self._arena)
        if len(self._arena.taken) > self._arena.holds(result):
            # A layer keeps a tensor that replays of other programs would overwrite.
            self._arena = Arena()
            self._programs = {key: None for key in self._programs if not self._programs[key]}
        program = None
        if replay is not None:
            program = StepProgram(own, plan, replay, replay.arguments_of(AttentionCall))
        self._programs[shape] = program
        return result

    def _inputs(self, shape: Shape, batch: ForwardBatch) -> tuple[ForwardBatch, NumbaPlan]:
        """Return the batch of a program, whose inputs have memory of their own."""
        layout, rows = batch.plan.layout, shape.rows
        if self._memory is None:
            self._memory = PlanMemory(layout, PROGRAM_ROWS, self._blocks)
        plan = self._backend.recorded_plan(layout, self._memory, rows)
        own = replace(
            batch,
            input_ids=self._input_ids[:rows],
            positions=self._positions[:rows],
            num_tokens=rows,
            plan=plan,
            adapters=TokenAdapters(self._slots[:rows]) if shape.has_adapters else None,
            runs=None if batch.runs is None else batch.runs.clone(),
        )
        return own, plan


def _copy_inputs(own: ForwardBatch, given: ForwardBatch) -> None:
    """Copy a step's inputs. Token 0 at position 0 is padding behind them."""
    _copy_rows(own.input_ids, given.input_ids)
    _copy_rows(own.positions, given.positions)
    if own.adapters is not None and given.adapters is not None:
        _copy_rows(own.adapters.slots, given.adapters.slots)
    if own.runs is not None and given.runs is not None:
        own.runs.copy_(given.runs)
    assert isinstance(own.plan, NumbaPlan)
    assert isinstance(given.plan, NumbaPlan)
    own.plan.follow(given.plan)


def _copy_rows(own: torch.Tensor, given: torch.Tensor) -> None:
    """Copy [T] to the first of R rows, and set the others to 0."""
    own[: len(given)].copy_(given)
    own[len(given) :].zero_()
