"""Sampler: logits to tokens, one row a sequence, each row independent of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.ops.kernels import Kernels
from engine.protocol import SamplingParams
from engine.sampling.draw import GREEDY_BELOW, INVALID, DrawParams, draw
from engine.sampling.filters import adjust, adjusts_logits, keep
from engine.sampling.logprobs import PendingLogprobs, gather_logprobs
from engine.sampling.noise import exponential_noise

# Filters look at this many most likely tokens first; nearly always they hold the top-p mass.
CANDIDATES = 256


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
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    params: DrawParams | None = None,
    kernels: Kernels = "torch",
) -> tuple[torch.Tensor, PendingLogprobs | None]:
    """Token ids [R] int64 for logits [R, V] (clobbered), and logprobs where asked for.

    What is more than finding the most likely token is computed in fp32, whatever their dtype. A row
    whose logits are not finite gets INVALID and leaves the others alone. With `params`, the rows'
    own as tensors, tokens are drawn as in a captured step, and the host need not wait.
    """
    highest, tokens = logits.max(dim=-1)
    # A NaN anywhere in a row is its maximum; -inf alone is legal (a model may mask tokens).
    bad = ~torch.isfinite(highest)
    counts = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs >= 0}
    raw = {i: torch.log_softmax(logits[i], dim=-1, dtype=torch.float32) for i in counts}
    adjusted = [i for i, row in enumerate(rows) if adjusts_logits(row.params)]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if adjusted or drawn:
        logits = logits.float()
    for i in adjusted:
        adjust(logits[i], rows[i].params, rows[i].tokens, rows[i].prompt_length)
    if params is not None:
        tokens = draw(logits.float(), params, kernels)
    else:
        if adjusted:
            tokens = logits.max(dim=-1).indices
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            chosen = logits if len(drawn) == len(rows) else logits.index_select(0, index)
            tokens.index_copy_(0, index, _draw(chosen, [rows[i] for i in drawn]))
    tokens.masked_fill_(bad, INVALID)
    return tokens, gather_logprobs(tokens, raw, counts) if counts else None


def is_plain(params: SamplingParams) -> bool:
    """Whether `draw` alone samples such a row: without its earlier tokens, and telling nothing."""
    return params.logprobs < 0 and not adjusts_logits(params)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample [R] tokens at temperature, within each row's filters."""
    params = [row.params for row in rows]
    device = logits.device

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    logits = logits / column([p.temperature for p in params])[:, None]
    seeds = column([p.seed for p in params], torch.int64)
    positions = column([row.position for row in rows], torch.int64)
    filtered = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if len(filtered) < len(rows):
        vocabulary = torch.arange(logits.shape[1], device=device)
        tokens = (
            (logits - exponential_noise(seeds, positions, vocabulary).log_()).max(dim=-1).indices
        )
    else:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    if filtered:
        at = torch.tensor(filtered, device=device)
        chosen = [params[i] for i in filtered]
        top_k = column([p.top_k for p in chosen])
        top_p, min_p = column([p.top_p for p in chosen]), column([p.min_p for p in chosen])
        tokens[at] = _draw_filtered(logits[at], seeds[at], positions[at], top_k, top_p, min_p)
    return tokens


def _draw_filtered(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Sample [R] tokens among the most likely ones, enough of them to decide each row's filters.

    Only the rows that need more are done again with more: how many candidates a row has decides
    the order of its ties, so it must not depend on the rest of the batch.
    """
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    tokens = torch.empty_like(seeds)
    rows = torch.arange(len(tokens), device=tokens.device)
    count = min(CANDIDATES, logits.shape[1])
    while True:
        scores, ids = logits.topk(count, dim=-1)
        stays = keep((scores - total).exp(), top_k, top_p, min_p)
        noise = exponential_noise(seeds, positions, ids).log_()
        best = (scores - noise).masked_fill_(~stays, float("-inf")).argmax(dim=-1, keepdim=True)
        tokens[rows] = ids.gather(1, best).squeeze(1)
        # top-p is a share of the top-k tokens' mass: that takes all of them.
        undecided = stays[:, -1] | (top_k > count) & (top_p < 1)
        if count == logits.shape[1] or not bool(undecided.any()):
            return tokens
        logits, total, rows = logits[undecided], total[undecided], rows[undecided]
        seeds, positions = seeds[undecided], positions[undecided]
        top_k, top_p, min_p = top_k[undecided], top_p[undecided], min_p[undecided]
        count = min(count * 16, logits.shape[1])
