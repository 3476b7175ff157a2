"""Logprobs of a step: gathered on the device, read when they are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from engine.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Of each row that asked, the sampled token's logprob, and the likeliest tokens with theirs."""

    counts: Mapping[int, int]  # row -> how many of the likeliest, in the order of the tensors
    values: torch.Tensor  # fp32, of each row 1 + count
    ids: torch.Tensor  # int64, of each row count

    def read(
        self, tokens: Sequence[int], values: Sequence[float], ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """One for each of `tokens`, from what `values` and `ids` hold; None where none was asked
        for or nothing could be sampled."""
        result: list[TokenLogprobs | None] = [None] * len(tokens)
        value, token = iter(values), iter(ids)
        for row, count in self.counts.items():
            own, *top = islice(value, 1 + count)
            likeliest = tuple(zip(islice(token, count), top, strict=True))
            if tokens[row] >= 0:
                result[row] = TokenLogprobs(own, likeliest)
        return result


def gather_logprobs(
    tokens: torch.Tensor, raw: Mapping[int, torch.Tensor], counts: Mapping[int, int]
) -> PendingLogprobs:
    """From the logprobs `raw` [V] of some rows, for sampled `tokens` [R]; -1 is no token."""
    values, ids = [tokens.new_empty(0, dtype=torch.float32)], [tokens.new_empty(0)]
    counts = {row: min(counts[row], len(logprobs)) for row, logprobs in raw.items()}
    for row, logprobs in raw.items():
        top = logprobs.topk(counts[row])
        values += [logprobs.gather(0, tokens[row : row + 1].clamp(min=0)), top.values]
        ids.append(top.indices)
    return PendingLogprobs(counts, torch.cat(values), torch.cat(ids))
