"""Sampler: logits to tokens, one row a sequence, each row independent of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.protocol import SamplingParams, TokenLogprobs
from engine.sampling.filters import adjust, adjusts_logits, keep
from engine.sampling.noise import exponential_noise

# Filters look at this many most likely tokens first; nearly always they hold the top-p mass.
CANDIDATES = 256
INVALID = -1  # sampled where a row's logits are not finite


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row to sample: its parameters, its known tokens and where its next token goes."""

    params: SamplingParams
    tokens: torch.Tensor  # [known] on the logits' device; a view, not a copy
    prompt_length: int

    @property
    def position(self) -> int:
        return self.tokens.shape[0]


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
    """Token ids [R] int64 for fp32 logits [R, V] (clobbered), and logprobs where asked for.

    A row whose logits are not finite gets INVALID and leaves the others alone.
    """
    highest, tokens = logits.max(dim=-1)
    # A NaN anywhere in a row is its maximum; -inf alone is legal (a model may mask tokens).
    bad = ~torch.isfinite(highest)
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs >= 0]
    raw = {i: torch.log_softmax(logits[i], dim=-1) for i in wanted}
    adjusted = [i for i, row in enumerate(rows) if adjusts_logits(row.params)]
    for i in adjusted:
        adjust(logits[i], rows[i].params, rows[i].tokens, rows[i].prompt_length)
    if adjusted:
        tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = logits if len(drawn) == len(rows) else logits.index_select(0, index)
        tokens.index_copy_(0, index, _draw(chosen, [rows[i] for i in drawn]))
    tokens.masked_fill_(bad, INVALID)
    return tokens, _logprobs(tokens, rows, raw)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample [R] tokens at temperature, within each row's filters."""
    params = [row.params for row in rows]
    device = logits.device

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    logits = logits / column([p.temperature for p in params])[:, None]
    seeds = torch.tensor([p.seed for p in params], dtype=torch.int64, device=device)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if len(filtered) < len(rows):
        vocabulary = torch.arange(logits.shape[1], device=device)
        tokens = (logits - exponential_noise(seeds, positions, vocabulary).log_()).argmax(dim=-1)
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    if filtered:
        at = torch.tensor(filtered, device=device)
        chosen = [params[i] for i in filtered]
        top_k = column([p.top_k for p in chosen])
        top_p, min_p = column([p.top_p for p in chosen]), column([p.min_p for p in chosen])
        scores, ids, stays = _candidates(logits[at], top_k, top_p, min_p)
        scores = scores - exponential_noise(seeds[at], positions[at], ids).log_()
        best = scores.masked_fill_(~stays, float("-inf")).argmax(dim=-1, keepdim=True)
        tokens[at] = ids.gather(1, best).squeeze(1)
    return tokens


def _candidates(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely tokens, enough of them to decide every filter: logits, ids, who stays."""
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    count = min(CANDIDATES, logits.shape[1])
    while True:
        scores, ids = logits.topk(count, dim=-1)
        stays = keep((scores - total).exp(), top_k, top_p, min_p)
        if count == logits.shape[1] or not bool(stays[:, -1].any()):
            return scores, ids, stays
        count = min(count * 16, logits.shape[1])


def _logprobs(
    tokens: torch.Tensor, rows: Sequence[SamplingRow], raw: dict[int, torch.Tensor]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(rows)
    for i, logprobs in raw.items():
        token = int(tokens[i])
        if token == INVALID:
            continue
        values, ids = logprobs.topk(min(rows[i].params.logprobs, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        result[i] = TokenLogprobs(float(logprobs[token]), top)
    return result
