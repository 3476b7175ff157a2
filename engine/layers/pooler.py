"""Pooler: the hidden states of whole texts become vectors, as in sentence-transformers.

Everything is fp32, and each operation is launched once for all texts of a step. The sum over a
text's tokens has the same order in any batch, so a vector does not depend on the other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.sentence_modules import (
    Activation,
    DenseConfig,
    PoolerConfig,
    PoolingMode,
)
from engine.device.transfer import to_device
from engine.layers.linear import Linear

Counts = npt.NDArray[np.int64]
ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
}


@dataclass(frozen=True)
class TextSpans:
    """Where each of the texts [N] is among T concatenated tokens, and how much of it is pooled."""

    lengths: Counts  # [N] tokens
    skipped: Counts  # [N] of these, at the beginning, that are not pooled
    lasts: Counts  # [N] the token of each text, as an index, that "lasttoken" reads

    @classmethod
    def of(
        cls, lengths: Sequence[int], skipped: Sequence[int], passed_over: Sequence[int] = ()
    ) -> TextSpans:
        """`skipped` counts may be above the lengths: then nothing of a text is pooled.

        "lasttoken" passes over `passed_over` tokens at the end of each text; by default none.
        """
        counts = np.array(lengths, dtype=np.int64)
        lasts = counts.cumsum() - 1
        if passed_over:
            lasts -= np.array(passed_over, dtype=np.int64)
        return cls(counts, np.minimum(np.array(skipped, dtype=np.int64), counts), lasts)

    @cached_property
    def ends(self) -> Counts:
        return self.lengths.cumsum()

    @cached_property
    def counts(self) -> Counts:
        """The numbers of pooled tokens."""
        return self.lengths - self.skipped

    @cached_property
    def firsts(self) -> Counts:
        """The first pooled token of each text, or its first token if none is pooled."""
        return self.ends - np.where(self.counts > 0, self.counts, self.lengths)

    @cached_property
    def bags(self) -> Counts:
        """The index of each text's first pooled token among all pooled tokens."""
        return self.counts.cumsum() - self.counts

    @cached_property
    def numbers(self) -> Counts:
        """The number of each pooled token in its text, from 1."""
        within = np.arange(self.counts.sum()) - np.repeat(self.bags, self.counts)
        return within + np.repeat(self.skipped, self.counts) + 1

    @cached_property
    def tokens(self) -> Counts:
        """The pooled tokens, as indices."""
        starts = self.ends - self.lengths
        return np.repeat(starts, self.counts) + self.numbers - 1

    @cached_property
    def texts(self) -> Counts:
        """The text of each pooled token."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class Pooler(nn.Module):
    """Pools texts by one or more modes, and applies the modules behind them.

    A model with a head of its own, such as a cross-encoder, has it in their place: see
    `engine.models.base.Classifier`.
    """

    def __init__(self, config: PoolerConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.size = len(config.modes) * hidden
        self.behind = nn.ModuleList(
            Dense(module) if isinstance(module, DenseConfig) else Normalize()
            for module in config.modules
        )

    @property
    def dense_modules(self) -> list[Dense]:
        return [module for module in self.behind if isinstance(module, Dense)]

    def pool(self, hidden: torch.Tensor, spans: TextSpans) -> torch.Tensor:
        """Return the pooled states [N, size] of hidden states [T, hidden], in fp32."""
        if not self.config.includes_prompt:
            pooled = spans
        else:
            pooled = TextSpans(spans.lengths, np.zeros_like(spans.skipped), spans.lasts)
        vectors = [_POOLINGS[mode](hidden, pooled) for mode in self.config.modes]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return vectors [N, numbers] of pooled states [N, size]."""
        for module in self.behind:
            pooled = module(pooled)
        return pooled


class Dense(nn.Module):
    """A linear layer in fp32 and an activation."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = Linear(
            config.in_features, config.out_features, bias=config.has_bias, is_rounded=False
        )
        self.linear.tensors.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.config.activation](self.linear(x))


class Normalize(nn.Module):
    """Vectors of length 1. A zero vector stays zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=1)


def _take(hidden: torch.Tensor, tokens: Counts) -> torch.Tensor:
    (index,) = to_device([tokens], hidden.device)
    return hidden.index_select(0, index).float()


def _first(hidden: torch.Tensor, spans: TextSpans) -> torch.Tensor:
    return _take(hidden, spans.firsts)


def _last(hidden: torch.Tensor, spans: TextSpans) -> torch.Tensor:
    return _take(hidden, spans.lasts)


def _sum(
    hidden: torch.Tensor, spans: TextSpans, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sum [N, hidden] over the pooled tokens of each text."""
    tokens, bags = to_device([spans.tokens, spans.bags], hidden.device)
    return F.embedding_bag(tokens, hidden.float(), bags, mode="sum", per_sample_weights=weights)


def _mean(hidden: torch.Tensor, spans: TextSpans, *, root: bool = False) -> torch.Tensor:
    """Return the mean, or the sum over the root of the count."""
    counts = np.maximum(spans.counts, 1)  # the sum over no tokens is 0
    (divisors,) = to_device([counts], hidden.device)
    by = divisors.float()
    return _sum(hidden, spans) / (by.sqrt() if root else by)[:, None]


def _weighted_mean(hidden: torch.Tensor, spans: TextSpans) -> torch.Tensor:
    """Return the mean weighted by the number of each token in its text."""
    ends, starts = spans.lengths, spans.skipped
    totals = np.maximum((ends * (ends + 1) - starts * (starts + 1)) // 2, 1)
    numbers, divisors = to_device([spans.numbers, totals], hidden.device)
    return _sum(hidden, spans, numbers.float()) / divisors.float()[:, None]


def _max(hidden: torch.Tensor, spans: TextSpans) -> torch.Tensor:
    """Return the largest number of each dimension; NaN if one is NaN."""
    tokens, texts = to_device([spans.tokens, spans.texts], hidden.device)
    numbers = hidden.float()
    if len(tokens) < len(numbers):
        numbers = numbers.index_select(0, tokens)
    lowest = numbers.new_full((len(spans.counts), hidden.shape[1]), -torch.inf)
    index = texts[:, None].expand_as(numbers)
    return lowest.scatter_reduce(0, index, numbers, reduce="amax")


_POOLINGS: Mapping[PoolingMode, Callable[[torch.Tensor, TextSpans], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": partial(_mean, root=True),
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
