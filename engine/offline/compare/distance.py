"""How far two distributions are apart, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.protocol.compare import TokenDistance


def kl_bits(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return sum p log2(p / q) [T] of log probabilities [T, V] to base e.

    A token that `own` cannot write adds nothing; one that only `other` cannot write makes it
    infinite.
    """
    terms = own.exp() * (own - other)
    return torch.where(own.isneginf(), 0.0, terms).sum(-1).clamp(min=0) / math.log(2)


def distances(answer: Sequence[int], own: torch.Tensor, other: torch.Tensor) -> list[TokenDistance]:
    """Return the distances along `answer`, which the model of `own` has written.

    `own` and `other` are log probabilities [answer, V].
    """
    places = torch.tensor(answer, dtype=torch.int64)[:, None]
    columns = zip(
        answer,
        [bits if math.isfinite(bits) else None for bits in kl_bits(own, other).tolist()],
        own.gather(1, places)[:, 0].exp().tolist(),
        other.gather(1, places)[:, 0].exp().tolist(),
        other.argmax(-1).tolist(),
        strict=True,
    )
    return [TokenDistance(*column) for column in columns]
