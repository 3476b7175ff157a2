"""Draw: the next token of each row on the device alone, as a captured decode step needs it.

Nothing here waits for the host or depends on it: rows of every kind share one batch, and their
parameters are tensors. What looks at a row's earlier tokens or tells of other tokens (penalties,
bias, top logprobs) is `sampler.sample`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.ops.kernels import Kernels
from engine.sampling.filters import keep
from engine.sampling.noise import exponential_noise

GREEDY_BELOW = 1e-5  # a temperature so low is greedy: dividing by it would overflow
INVALID = -1  # drawn where a row's logits are not finite


class DrawParams(NamedTuple):
    """How each of R rows is drawn: tensors [R] on the logits' device."""

    temperature: torch.Tensor  # fp32; below GREEDY_BELOW the most likely token is taken
    top_k: torch.Tensor  # int32; 0 keeps all
    top_p: torch.Tensor  # fp32; 1 keeps all
    min_p: torch.Tensor  # fp32; 0 keeps all
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64: where in its sequence the drawn token will stand


def draw(logits: torch.Tensor, rows: DrawParams, kernels: Kernels) -> torch.Tensor:
    """Tokens [R] int64 for fp32 logits [R, V], which stay as they are; INVALID where a row is not
    finite.

    Equally likely tokens rank by their number, the lowest first.
    """
    if kernels == "triton":
        from engine.kernels.triton.draw import draw_tokens

        return draw_tokens(logits, *rows, GREEDY_BELOW, INVALID)
    highest, likeliest = logits.max(dim=-1)
    scores = logits / rows.temperature.clamp(min=GREEDY_BELOW)[:, None]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    probs = torch.softmax(scores, dim=-1).gather(1, order)
    stays = keep(probs, rows.top_k, rows.top_p, rows.min_p)
    kept = torch.empty_like(stays).scatter_(1, order, stays)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    noise = exponential_noise(rows.seeds, rows.positions, vocabulary).log_()
    drawn = (scores - noise).masked_fill_(~kept, float("-inf")).argmax(dim=-1)
    tokens = torch.where(rows.temperature < GREEDY_BELOW, likeliest, drawn)
    return tokens.masked_fill_(~torch.isfinite(highest), INVALID)
