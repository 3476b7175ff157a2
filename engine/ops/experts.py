"""Routing of tokens to experts, and linear layers where each row has its expert's weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch

from engine.ops.gated import sigmoid
from engine.ops.kernels import Kernels
from engine.ops.linear import linear

TINY = 1e-20  # far below a rounding of any sum but 0
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
        """`starts` on the host, by reads that a recorder sees. It does not see `tolist`."""
        return [int(start) for start in self.starts]


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in `count` equal groups. A token uses `chosen` ones (arXiv 2405.04434).

    They are those with the largest sums of their `best` highest scores.
    """

    count: int
    chosen: int
    best: int


def route(
    logits: torch.Tensor,
    per_token: int,
    *,
    renormalises: bool,
    is_sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    groups: ExpertGroups | None = None,
    scale: float = 1.0,
    eps: float = TINY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts with the largest logits [T, experts], and their weights [T, k] in fp32.

    Weights are softmax probabilities, or sigmoids. With `renormalises` those of a token add up to
    1, but for `eps`; then `scale` multiplies them. `bias` [experts] is added to the scores for the
    choice alone.
    """
    scores = sigmoid(logits.float()) if is_sigmoid else logits.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    if groups is not None:
        choice = choice.masked_fill(~_in_chosen_groups(choice, groups), -math.inf)
    experts = choice.topk(per_token).indices
    weights = scores.gather(1, experts)
    if renormalises:  # sigmoids may all be 0
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return experts, weights if scale == 1.0 else weights * scale


def _in_chosen_groups(scores: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Return which experts are in the groups that a token uses, [T, experts]."""
    by_group = scores.unflatten(1, (groups.count, -1))
    ranks = by_group.topk(groups.best).values.sum(-1)
    chosen = ranks.topk(groups.chosen).indices
    is_chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter(1, chosen, True)
    return is_chosen.unsqueeze(-1).expand_as(by_group).flatten(1)


def rows_by_expert(experts: torch.Tensor, count: int) -> ExpertRows:
    """Sort the pairs of `experts` [T, k] by expert; those of an expert stay in order."""
    chosen, pairs = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(chosen, torch.arange(count + 1, device=chosen.device))
    return ExpertRows(pairs, starts, experts.shape[1])


def combine(y: torch.Tensor, rows: ExpertRows, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums [T, N] of the experts' results y [P, N]; weights are [T, k].

    A token's results are added in fp32 in the order of its experts' ranks, so that its bits depend
    on no other token.
    """
    indices = rows.pairs.argsort()
    by_token = y.index_select(0, indices)
    ranked = by_token.unflatten(0, weights.shape).float()
    shares = weights[..., None]
    total = ranked[:, 0] * shares[:, 0]
    for rank in range(1, rows.per_token):
        part = ranked[:, rank] * shares[:, rank]
        total = total + part
    return total.to(y.dtype)


def expert_by_expert(
    x: torch.Tensor, experts: Sequence[Multiply], rows: ExpertRows
) -> torch.Tensor:
    """Return [P, out] for x [P, in], sorted by expert."""
    spans = pairwise(rows.bounds)
    products = []
    for (first, end), multiply in zip(spans, experts, strict=True):
        if end > first:
            selected = x[first:end]
            products.append(multiply(selected))
    return torch.cat(products)


def experts_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: ExpertRows,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return [P, out] for x [P, in], sorted by expert.

    The weight is [experts, out, in] and the bias [experts, out].
    """
    if kernels == "triton":
        from engine.kernels.triton.experts import multiply_experts

        return multiply_experts(x, weight, bias, rows.starts)
    multiplies = []
    for expert, expert_weight in enumerate(weight):
        expert_bias = None if bias is None else bias[expert]
        multiplies.append(partial(linear, weight=expert_weight, bias=expert_bias, kernels=kernels))
    return expert_by_expert(x, multiplies, rows)
