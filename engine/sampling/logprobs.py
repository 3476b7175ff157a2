"""Logprobs of a step: gathered on the device, read when they are on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch

from engine.device.transfer import HostCopy
from engine.protocol import TokenLogprobs

PROMPT_ROWS = 64  # of a prompt at once: logits are as wide as the vocabulary


class PendingLogprobs:
    """Of each row that asked, its token's logprob, and the likeliest tokens with theirs."""

    def __init__(self, counts: Mapping[int, int], values: torch.Tensor, ids: torch.Tensor) -> None:
        """counts: row -> how many of the likeliest, in the order of the tensors; values: fp32, of
        each row 1 + count; ids: int64, of each row count."""
        self._counts = counts
        self._copy = HostCopy([values, ids])

    def read(self) -> dict[int, TokenLogprobs]:
        """By row. Of a row of which nothing could be sampled they mean nothing."""
        values, ids = (iter(tensor.tolist()) for tensor in self._copy.wait())
        result = {}
        for row, count in self._counts.items():
            own, *top = islice(values, 1 + count)
            result[row] = TokenLogprobs(own, tuple(zip(islice(ids, count), top, strict=True)))
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


def score(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    count: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> PendingLogprobs:
    """Of known `tokens` [R], each by the hidden state [R, hidden] before it, with the `count`
    likeliest in its place. `logits_of` gives logits [R, V] of hidden states."""
    values, ids, width = [], [], count
    for own, part in zip(hidden.split(PROMPT_ROWS), tokens.split(PROMPT_ROWS), strict=True):
        logprobs = torch.log_softmax(logits_of(own), dim=-1, dtype=torch.float32)
        top = logprobs.topk(width := min(count, logprobs.shape[1]))
        scores = logprobs.gather(1, part.long()[:, None])
        values.append(torch.cat([scores, top.values], dim=1).flatten())
        ids.append(top.indices.flatten())
    counts = dict.fromkeys(range(len(tokens)), width)
    return PendingLogprobs(counts, torch.cat(values), torch.cat(ids))
