"""Logprobs of a step: gathered on the device, read when they have arrived on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, repeat

import torch

from engine.device.transfer import HostCopy
from engine.protocol.generate import TokenLogprobs

PROMPT_ROWS = 64  # prompt tokens per chunk of logits, which are as wide as the vocabulary


class PendingLogprobs:
    """For some rows: the logprob of the row's token, and other tokens with theirs."""

    def __init__(
        self,
        counts: Mapping[int, int],
        values: torch.Tensor,
        ids: torch.Tensor,
        ranks: torch.Tensor | None = None,
    ) -> None:
        """Copy the logprobs to the host.

        `counts` maps a row to its number of other tokens, in the order of the tensors.
        `values` fp32 holds 1 + count numbers per row, `ids` int64 holds count, and `ranks` int64
        holds one if they are known.
        """
        self._counts = counts
        self._copy = HostCopy(
            [values, ids] if ranks is None else [values, ids, ranks], values.device
        )

    def read(self) -> dict[int, TokenLogprobs]:
        """Return the logprobs by row. They mean nothing for a row without a sampled token."""
        values, ids, *known = (iter(tensor.tolist()) for tensor in self._copy.wait())
        ranks = known[0] if known else repeat(None)
        result = {}
        for row, count in self._counts.items():
            own, *logprobs = islice(values, 1 + count)
            tokens = islice(ids, count)
            top = tuple(zip(tokens, logprobs, strict=True))
            result[row] = TokenLogprobs(own, top, next(ranks))
        return result


def gather_logprobs(
    tokens: torch.Tensor,
    raw: Mapping[int, torch.Tensor],
    counts: Mapping[int, int],
    named: Mapping[int, Sequence[int]],
) -> PendingLogprobs:
    """Gather from the logprobs `raw` [V] of some rows, for sampled `tokens` [R]; -1 is no token.

    A row in `named` gets the logprobs of these tokens in place of its most likely ones.
    """
    values = [tokens.new_empty(0, dtype=torch.float32)]
    ids = [tokens.new_empty(0)]
    counts = {row: min(counts[row], len(logprobs)) for row, logprobs in raw.items()}
    for row, logprobs in raw.items():
        own = logprobs.gather(0, tokens[row : row + 1].clamp(min=0))
        if row in named:
            chosen = torch.tensor(named[row], device=logprobs.device)
            found = logprobs[chosen]
        else:
            found, chosen = logprobs.topk(counts[row])
        values += [own, found]
        ids.append(chosen)
    return PendingLogprobs(counts, torch.cat(values), torch.cat(ids))


def prompt_logprobs(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    count: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> PendingLogprobs:
    """Return the logprobs and ranks of known `tokens` [R], and the `count` most likely ones.

    `hidden` [R, hidden] is the state before each token. `logits_of` computes logits [R, V] from it.
    """
    values = []
    ids = []
    ranks = []
    width = count
    for states, part in zip(hidden.split(PROMPT_ROWS), tokens.split(PROMPT_ROWS), strict=True):
        logprobs = torch.log_softmax(logits_of(states), dim=-1, dtype=torch.float32)
        width = min(count, logprobs.shape[1])
        top = logprobs.topk(width)
        own = logprobs.gather(1, part.long()[:, None])
        values.append(torch.cat([own, top.values], dim=1).flatten())
        ids.append(top.indices.flatten())
        ranks.append(1 + (logprobs > own).sum(dim=1))
    counts = dict.fromkeys(range(len(tokens)), width)
    return PendingLogprobs(counts, torch.cat(values), torch.cat(ids), torch.cat(ranks))
