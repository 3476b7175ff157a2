"""DecodePrograms: whole steps of decodes on a CPU, recorded once per number of rows.

A program begins with row ids and ends with tokens, as a step graph does on a GPU: its kernels
gather the inputs from SequenceRows, compute the model and the logits, draw the tokens and append
them. Its bits are those of a step that Python computes. Python has little to do then, and little to
load into caches that the weights have passed through.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import torch

from engine.attention.kv_cache import KVCache
from engine.attention.numba import NumbaBackend
from engine.device.openmp_wait import OpenMPWait
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.sequence_rows import DECODE_KERNELS
from engine.memory.estimate import DECODE_PROGRAM_ROWS
from engine.models.base import Model
from engine.ops.arena import Arena
from engine.ops.program import Replay, record
from engine.runner.batch import decode_batch
from engine.runner.sequence_rows import SequenceRows
from engine.runner.step_programs import RECORDED_AT
from engine.scheduling.step import Step

Program: TypeAlias = Replay | None  # None: the model computes something that cannot be replayed


class DecodePrograms:
    """Computes steps of up to DECODE_PROGRAM_ROWS decodes, without adapters and drafts.

    Programs share their inputs and tensors as those of StepPrograms do, and run as these do only
    while cores are not scarce.
    """

    def __init__(
        self,
        model: Model,
        rows: SequenceRows,
        kv: KVCache,
        backend: NumbaBackend,
        openmp_wait: OpenMPWait,
    ) -> None:
        for kernel in DECODE_KERNELS:  # nothing is compiled while serving
            kernel_store().address(str(kernel[0]))
        self._model, self._rows, self._kv, self._backend = model, rows, kv, backend
        self._openmp_wait = openmp_wait
        self._arena = Arena()
        self._row_ids = torch.zeros(DECODE_PROGRAM_ROWS, dtype=torch.int64)
        self._ahead = torch.zeros(DECODE_PROGRAM_ROWS, dtype=torch.int64)  # no token is drafted
        self._held: list[int] = []  # the row ids at the beginning of `_row_ids`
        self._steps: Counter[int] = Counter()  # of numbers of rows without a program
        self._programs: dict[int, Program] = {}

    def __call__(self, step: Step) -> torch.Tensor | None:
        """Compute a step and return its tokens [R] int64, valid until the next call.

        Returns None if nothing was computed: for other steps, and before a program is recorded.
        """
        count = len(step.slices)
        if count > DECODE_PROGRAM_ROWS or self._openmp_wait.contended:
            return None
        for s in step.slices:
            if s.count != 1 or not s.samples or s.adapter_slot or s.draft >= 0:
                return None
        if count not in self._programs:
            self._steps[count] += 1
            if self._steps[count] < RECORDED_AT:
                return None
            self._send([s.row for s in step.slices])
            return self._record(count)
        program = self._programs[count]
        if program is None:
            return None
        self._send([s.row for s in step.slices])
        return program()

    def _send(self, rows: list[int]) -> None:
        """Write the row ids of a step, if they are others than those of the last one."""
        if rows != self._held:
            self._row_ids[: len(rows)] = torch.tensor(rows)
            self._held = rows

    def _record(self, count: int) -> torch.Tensor:
        """Compute the step of these rows once, keep its program, and return its tokens."""
        tokens, program = record(lambda: self._compute(count), self._arena)
        if len(self._arena.taken) > self._arena.holds(tokens):
            # A layer keeps a tensor that replays of other programs would overwrite.
            self._arena = Arena()
            self._programs = {key: None for key in self._programs if not self._programs[key]}
        self._programs[count] = program
        return tokens

    def _compute(self, count: int) -> torch.Tensor:
        row_ids, ahead = self._row_ids[:count], self._ahead[:count]
        batch = decode_batch(row_ids, ahead, self._rows, self._kv, self._backend)
        logits = self._model.logits(self._model.forward(batch))
        del batch
        return self._rows.draw_next(logits, row_ids, ahead, static=True)
