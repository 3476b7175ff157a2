"""What changes logits before sampling: penalties, bias, suppressed stops; and which tokens stay."""

from __future__ import annotations

import torch

from engine.protocol import SamplingParams


def adjusts_logits(params: SamplingParams) -> bool:
    """Whether `adjust` would change anything for these parameters."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
    )


def adjust(
    logits: torch.Tensor, params: SamplingParams, tokens: torch.Tensor, prompt_length: int
) -> None:
    """Apply penalties, bias and the ban on early stops to one row [V], in place.

    `tokens` are all known ones, prompt first. Repetition looks at prompt and answer (CTRL, arXiv
    1909.05858), presence and frequency at the answer alone (OpenAI's definition).
    """
    answer = tokens[prompt_length:]
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if (params.presence_penalty or params.frequency_penalty) and len(answer):
        seen, counts = torch.unique(answer, return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if len(answer) < params.min_tokens and params.stop_token_ids:
        logits[list(params.stop_token_ids)] = float("-inf")


def keep(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which candidates stay, [R, K] bool, for `probs` sorted from the most likely down.

    top-k first, then top-p over what that left, then min-p relative to the most likely. The most
    likely token always stays. A top_k of 0 keeps all, and so does a top_p of 1.
    """
    rank = torch.arange(probs.shape[1], device=probs.device)
    within_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probs = probs * within_k
    sums = probs.cumsum(-1)
    mass = torch.where(top_k[:, None] == 0, 1.0, sums[:, -1:])
    # Rounding must not end a sum early where all is kept.
    limit = torch.where(top_p[:, None] < 1, top_p[:, None] * mass, float("inf"))
    stays = within_k & (sums - probs < limit) & (probs >= min_p[:, None] * probs[:, :1])
    stays[:, 0] = True
    return stays
