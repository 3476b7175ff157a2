"""ForwardBatch: the tensors of one step, passed explicitly to the model and its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionPlan
from engine.attention.kv_cache import KVCache
from engine.ops.lora import TokenAdapters
from engine.ops.seen_tokens import SeenTokens
from engine.ops.state_runs import StateRuns


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The T tokens of a step, concatenated; logits are computed for L of them.

    Tokens from index `num_tokens` on are padding, which takes no part in attention.
    """

    input_ids: torch.Tensor  # [T] int64
    # Of the position embedding, [T] int64: the numbers of the tokens, less what images save. [3, T]
    # if a token shows an image whose embeddings have a row and a column (see RotarySections).
    positions: torch.Tensor
    logit_index: torch.Tensor  # [L] int64 into the tokens
    kv: KVCache
    plan: AttentionPlan
    num_tokens: int
    adapters: TokenAdapters | None = None  # None: no token has one
    runs: StateRuns | None = None  # None: no layer keeps a state
    types: torch.Tensor | None = None  # [T] int64, of an encoder's tokens; None: all are 0
    seen: SeenTokens | None = None  # None: no token shows an image
    # Whether each sublayer's output passes the `add` of a norm, where an ablation changes it.
    adds_apart: bool = False

    def padded(self, rows: int) -> Self:
        """Return the batch padded to `rows` tokens with token 0 at position 0."""
        missing = rows - len(self.input_ids)
        if not missing:
            return self
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, missing)),
            positions=F.pad(self.positions, (0, missing)),
            runs=None if self.runs is None else self.runs.padded(missing),
            types=None if self.types is None else F.pad(self.types, (0, missing)),
            adapters=None if self.adapters is None else self.adapters.padded(missing),
        )
