"""ForwardBatch: the tensors of one step, handed explicitly to the model and its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionPlan
from engine.attention.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of a step one after another; T tokens of which L want logits.

    Those behind `num_tokens` are nobody's: they attend to nothing, and nothing to them.
    """

    input_ids: torch.Tensor  # [T] int64
    prev_ids: torch.Tensor  # [T] int64: the token before each; position 0 has none, and any id
    positions: torch.Tensor  # [T] int64
    logit_index: torch.Tensor  # [L] int64 into the tokens
    kv: KVCache
    plan: AttentionPlan
    num_tokens: int

    def filled_up(self, rows: int) -> Self:
        """With tokens 0 at position 0 behind the others, until there are `rows`."""
        missing = rows - len(self.positions)
        if not missing:
            return self
        ids, prev_ids, positions = (
            F.pad(each, (0, missing)) for each in (self.input_ids, self.prev_ids, self.positions)
        )
        return replace(self, input_ids=ids, prev_ids=prev_ids, positions=positions)
