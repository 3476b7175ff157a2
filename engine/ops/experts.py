"""Routing of tokens to experts, and linear layers of which each row uses its expert's weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

Multiply = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The pairs of a token and one of its experts, sorted by expert.

    P = T * k, for T tokens with k experts each.
    """

    pairs: torch.Tensor  # [P]: t * k + the rank of the expert of token t
    starts: torch.Tensor  # [experts + 1]: rows starts[e] to starts[e + 1] use expert e
    per_token: int

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row, [P]."""
        return self.pairs // self.per_token

    @cached_property
    def bounds(self) -> list[int]:
        """`starts` on the host."""
        found: list[int] = self.starts.tolist()
        return found


def route(
    logits: torch.Tensor, per_token: int, *, renormalises: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts with the largest logits [T, experts], and their weights [T, k] in fp32.

    Weights are softmax probabilities. With `renormalises` those of a token add up to 1.
    """
    weights, experts = logits.float().softmax(-1).topk(per_token)
    if renormalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def rows_by_expert(experts: torch.Tensor, count: int) -> ExpertRows:
    """Sort the pairs of `experts` [T, k] by expert; those of an expert stay in order."""
    flat = experts.flatten()
    ids = torch.arange(count, device=flat.device)
    ends = (flat[:, None] == ids).sum(0).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))
    return ExpertRows(flat.argsort(stable=True), starts, experts.shape[1])


def combine(y: torch.Tensor, rows: ExpertRows, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums [T, N] of the experts' results y [P, N]; weights are [T, k].

    A token's results are added in fp32 in the order of its experts' ranks, so that its bits depend
    on no other token.
    """
    places = rows.pairs.argsort()
    ranked = y.index_select(0, places).unflatten(0, weights.shape).float()
    total = ranked[:, 0] * weights[:, :1]
    for rank in range(1, rows.per_token):
        total = total + ranked[:, rank] * weights[:, rank : rank + 1]
    return total.to(y.dtype)


def expert_by_expert(
    x: torch.Tensor, experts: Sequence[Multiply], rows: ExpertRows
) -> torch.Tensor:
    """Return [P, out] for x [P, in], sorted by expert."""
    spans = zip(pairwise(rows.bounds), experts, strict=True)
    return torch.cat([multiply(x[first:end]) for (first, end), multiply in spans if end > first])
