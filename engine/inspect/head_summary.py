"""SummaryBuilder: what each head of a layer does, from its attention weights in parts."""

from __future__ import annotations

from itertools import pairwise

import torch

from engine.attention.spec import AttentionSpec
from engine.protocol.lens import THUMB, HeadSummaries


class SummaryBuilder:
    """Adds up the weights of one layer, query by query.

    `tokens` [T] int64 are those of a decoder, whose queries and keys they are. None: of the other
    kinds of attention there are only thumbnails and flatness.
    """

    def __init__(self, spec: AttentionSpec, keys: int, tokens: torch.Tensor | None) -> None:
        self._spec, self._keys, self._tokens = spec, keys, tokens
        self._thumbs: list[torch.Tensor] = []  # [H, queries, THUMB] of each part
        self._sums: dict[str, torch.Tensor] = {}  # [H]
        self._counts: dict[str, int] = {}  # queries that count

    def add(self, first: int, weights: torch.Tensor) -> None:
        """Add weights [H, queries, K] of queries from position `first` on."""
        self._thumbs.append(_largest(weights, 2))
        positions = torch.arange(first, first + weights.shape[1], device=weights.device)
        self._add_flatness(weights, positions)
        if self._tokens is not None:
            self._add_kinds(weights, positions, self._tokens)

    def _add_flatness(self, weights: torch.Tensor, positions: torch.Tensor) -> None:
        visible = self._visible(positions)
        several = visible > 1
        entropies = -torch.special.xlogy(weights, weights).sum(-1)  # [H, queries]
        shares = entropies / visible.clamp(min=2).log()
        self._add("flatness", shares * several, int(several.sum()))

    def _visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Return how many keys the queries at `positions` [T] see."""
        reach = (self._spec.window or self._keys) - 1
        before = positions.clamp(max=reach)
        if self._spec.kind == "causal":
            return before + 1
        if self._spec.window is None:
            return torch.full_like(positions, self._keys)
        return before + 1 + (self._keys - 1 - positions).clamp(max=reach)

    def _add_kinds(
        self, weights: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        later = positions > 0
        previous = (positions - 1).clamp(min=0)
        index = previous[None, :, None].expand(len(weights), -1, 1)
        count = int(later.sum())
        self._add("previous", weights.gather(2, index)[..., 0] * later, count)
        self._add("first", weights[..., 0] * later, count)
        # Key k follows an earlier occurrence of the query's token if token k - 1 is that token.
        keys = torch.arange(1, self._keys, device=weights.device)
        follows = tokens[positions][:, None] == tokens[:-1][None]
        follows &= keys < positions[:, None]
        self._add("induction", (weights[..., 1:] * follows).sum(-1), int(follows.any(-1).sum()))

    def _add(self, name: str, values: torch.Tensor, count: int) -> None:
        """Add the sum of values [H, queries], where `count` queries count."""
        total = values.double().sum(-1)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + count

    def summary(self) -> HeadSummaries:
        thumbs = _largest(torch.cat(self._thumbs, 1), 1)
        shades = (255 * thumbs.clamp(min=0).sqrt()).round().to(torch.uint8).cpu()
        _, rows, columns = shades.shape
        induction = self._mean("induction") if self._counts.get("induction") else ()
        return HeadSummaries(
            thumb_rows=rows,
            thumb_columns=columns,
            thumbs=shades.numpy().tobytes(),
            flatness=self._mean("flatness"),
            previous=self._mean("previous"),
            first=self._mean("first"),
            induction=induction,
        )

    def _mean(self, name: str) -> tuple[float, ...]:
        if name not in self._sums:
            return ()
        return tuple((self._sums[name] / max(self._counts[name], 1)).tolist())


def _largest(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the largest value of each of THUMB parts of an axis, if it is longer."""
    size = values.shape[axis]
    if size <= THUMB:
        return values
    edges = [place * size // THUMB for place in range(THUMB + 1)]
    parts = [values.narrow(axis, start, end - start).amax(axis) for start, end in pairwise(edges)]
    return torch.stack(parts, axis)
