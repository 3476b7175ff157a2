"""ForwardBatch: the tensors of one step, handed explicitly to the model and its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionPlan
from engine.attention.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of a step one after another; T tokens of which L want logits."""

    input_ids: torch.Tensor  # [T] int64
    prev_ids: torch.Tensor  # [T] int64: the token before each; position 0 has none, and any id
    positions: torch.Tensor  # [T] int64
    logit_index: torch.Tensor  # [L] int64 into the tokens
    kv: KVCache
    plan: AttentionPlan
