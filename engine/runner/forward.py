"""ModelForward: computes the hidden states of a batch, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.batch import ForwardBatch
from engine.models.adapters import ModelAdapters
from engine.models.base import Model
from engine.runner.batch import compute

# oneDNN compiles a kernel for each shape of a linear and each number of tokens, and keeps 512 of
# half a megabyte each (engine/client/subprocess.py). So token counts above a few are rounded up to
# a multiple: of 16 for texts, which add up to any number; of 8 for decoder steps, where every token
# costs without AMX.
FEW_TOKENS, TEXT_TOKENS_MULTIPLE, STEP_TOKENS_MULTIPLE = 32, 16, 8
Forward = Callable[[ForwardBatch], torch.Tensor]


class ModelForward:
    """Returns hidden states [T, hidden] of any batch, and of padding behind it.

    `rounds_tokens` rounds token counts up, for weights in oneDNN's layout. With other ranks a step
    must not be computed again, because they would not do so.
    """

    def __init__(
        self,
        model: Model,
        adapters: ModelAdapters | None,
        *,
        rounds_tokens: bool,
        may_compute_again: bool,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._rounds_tokens = rounds_tokens
        self.may_compute_again = may_compute_again

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        batch = batch.padded(self.round_up(batch.num_tokens, STEP_TOKENS_MULTIPLE))
        try:
            return compute(self._model, self._adapters, batch)
        except torch.OutOfMemoryError:
            # A layer may have advanced a state in its place.
            if not self.may_compute_again or batch.runs is not None:
                raise
            # The allocator keeps freed memory in pieces. Without them the step may fit: its size
            # was measured at start. Computing again writes the same KV to the same places.
            torch.cuda.empty_cache()
            return compute(self._model, self._adapters, batch)

    def round_up(self, tokens: int, multiple: int) -> int:
        """Round a token count up to a multiple, so that oneDNN compiles fewer kernels."""
        if tokens <= FEW_TOKENS or not self._rounds_tokens:
            return tokens
        return -(-tokens // multiple) * multiple
