"""Operations on logits before a token is drawn: penalties, biases, masks, and the sampling cuts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.protocol.generate import SamplingParams

MASK_BITS = 8  # tokens in one byte of a grammar mask
GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them would overflow
CANDIDATES = 256  # tokens that nearly always hold the typical ones
NEUTRAL = SamplingParams(max_tokens=1)


def adjusts_logits(params: SamplingParams) -> bool:
    """Whether `adjust` would change anything for these parameters."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.banned_sequences
    )


def adjust(
    logits: torch.Tensor, params: SamplingParams, tokens: torch.Tensor, prompt_length: int
) -> None:
    """Apply penalties, biases and bans to one row [V], in place: all but the allowed tokens, stop
    tokens that come too early, and tokens that would complete a banned sequence.

    `tokens` [known] are the prompt's and the answer's. The repetition penalty counts both (CTRL,
    arXiv 1909.05858). Presence and frequency penalties count the answer alone, as OpenAI defines.
    """
    answer = tokens[prompt_length:]
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.presence_penalty or params.frequency_penalty) and len(answer):
        seen, counts = torch.unique(answer, return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    if len(answer) < params.min_tokens and params.stop_token_ids:
        logits[list(params.stop_token_ids)] = float("-inf")
    if params.banned_sequences:
        ban(logits, params.banned_sequences, answer)


def ban(logits: torch.Tensor, sequences: Sequence[Sequence[int]], answer: torch.Tensor) -> None:
    """Ban the tokens that would complete one of `sequences` behind `answer` [known], in place.

    `logits` [V] stay as they are if no other token is left: the request would end with an error.
    Nothing is read on the host, which may not know the last token of `answer` yet.
    """
    by_length: dict[int, list[Sequence[int]]] = defaultdict(list)
    for sequence in sequences:
        by_length[len(sequence)].append(sequence)
    penalty = torch.zeros_like(logits)
    for length, equally_long in by_length.items():
        first = len(answer) - (length - 1)
        if first < 0:
            continue
        table = torch.tensor(equally_long, device=logits.device)
        is_complete = (answer[first:] == table[:, :-1]).all(dim=1)
        values = torch.zeros_like(is_complete, dtype=logits.dtype)
        values.masked_fill_(is_complete, float("-inf"))
        penalty.index_add_(0, table[:, -1], values)
    banned = logits + penalty
    none_left = banned.amax() == float("-inf")
    logits.copy_(torch.where(none_left, logits, banned))


def mask(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    `logits` [R, V]; `rows` [K] int64 are the rows with a mask. `allowed` [K, ceil(V / 32)] int32
    holds one bit per token, the lowest bit first: llguidance's layout.

    If all allowed tokens have a logit of minus infinity, because the model suppresses them or they
    would end the answer before `min_tokens`, they become equally likely.
    """
    shifts = torch.arange(MASK_BITS, dtype=torch.uint8, device=allowed.device)
    bits = (allowed.view(torch.uint8)[:, :, None] >> shifts) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    masked = logits.index_select(0, rows).masked_fill_(~is_allowed, float("-inf"))
    none_left = masked.amax(dim=-1, keepdim=True) == float("-inf")
    masked.masked_fill_(none_left & is_allowed, 0)
    logits.index_copy_(0, rows, masked)


def cut(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return which candidates stay, [R, K] bool, for `probs` [R, K] sorted in descending order.

    top-k comes first, then top-p over the mass that top-k kept, then min-p relative to the most
    likely token, which always stays. A top_k of 0 and a top_p of 1 keep everything.
    """
    rank = torch.arange(probs.shape[1], device=probs.device)
    keeps_all = top_k[:, None] == 0
    within_k = keeps_all | (rank < top_k[:, None])
    probs = probs * within_k
    sums = probs.cumsum(-1)
    mass = torch.where(keeps_all, 1.0, sums[:, -1:])
    # Without top-p, rounding of the running sum must not exclude any token.
    limit = torch.where(top_p[:, None] < 1, top_p[:, None] * mass, float("inf"))
    within_p = sums - probs < limit
    within_min_p = probs >= min_p[:, None] * probs[:, :1]
    stays = within_k & within_p & within_min_p
    stays[:, 0] = True
    return stays


# ---- plain cuts ----------------------------------------------------------------------------------
# They need the whole distribution of a row. `draw` computes temperature, top-k, top-p and min-p of
# a batch, on every device and in step graphs. A row that uses another cut comes here before: a
# removed token has a logit of minus infinity, and the draw goes on with the others. A row alone has
# the same bits in every batch.


def top_n_sigma(scores: torch.Tensor, count: float) -> torch.Tensor:
    """Keep scores that are up to `count` standard deviations below the highest one.

    The deviation is that of all scores that are not removed yet (Tang et al., arXiv 2411.07641). As
    in llama.cpp, a `count` of 0 or less keeps all.
    """
    is_token = scores > float("-inf")
    if count <= 0:
        return is_token
    number = is_token.sum()
    mean = scores.masked_fill(~is_token, 0).sum() / number
    variance = (scores - mean).square().masked_fill(~is_token, 0).sum() / number
    return scores >= scores.amax() - count * variance.sqrt()


def top_k(scores: torch.Tensor, count: float) -> torch.Tensor:
    """Keep the `count` likeliest tokens; of equal ones those with the lowest ids."""
    count = min(int(count), len(scores))
    least = scores.topk(count).values[-1]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def typical_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Keep the tokens whose information is nearest to the entropy, until they exceed `share`.

    Locally typical sampling (Meister et al., arXiv 2202.00666). As in llama.cpp, the token that
    exceeds `share` stays, so that at least one does. The likeliest token may go.
    """
    logprobs = torch.log_softmax(scores, dim=0)
    probs = logprobs.exp()
    distance = (-logprobs - torch.special.entr(probs).sum()).abs()
    # A GPU sorts all tokens: to read the sum, the host would wait for it.
    count = len(scores) if scores.is_cuda else min(CANDIDATES, len(scores))
    while True:
        nearest = distance.topk(count, largest=False).indices
        sums = probs[nearest].cumsum(0)
        if count == len(scores) or sums[-1] > share:
            break
        count = min(count * 16, len(scores))
    kept = torch.zeros_like(scores, dtype=torch.bool)
    return kept.index_copy_(0, nearest, sums - probs[nearest] <= share)


# By parameter, in the order of application. Each gets the scores [V] fp32 of the tokens, which are
# logits over temperature, and the parameter's value. It returns which tokens stay, [V] bool.
# top-k is here for the cuts behind it; `draw` knows it, too.
PLAIN_CUTS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typical_p": typical_p,
}
OF_DRAW = ("top_k", "top_p", "min_p")  # cuts that alone do not need this path


def needs_plain_cuts(params: SamplingParams) -> bool:
    """Whether a row has a cut that `draw` does not compute. Greedy rows need no cuts."""
    others = [name for name in PLAIN_CUTS if name not in OF_DRAW and _is_on(params, name)]
    return params.temperature >= GREEDY_BELOW and bool(others)


def _is_on(params: SamplingParams, name: str) -> bool:
    return getattr(params, name) != getattr(NEUTRAL, name)


def plain_cuts(logits: torch.Tensor, params: SamplingParams) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each cut's name, and the tokens [V] bool that it removes from a row's logits [V].

    Logits that are not finite stay, so that the draw finds them.
    """
    scores = logits.float() / params.temperature
    is_valid = torch.isfinite(scores.amax())
    for name, cut in PLAIN_CUTS.items():
        if _is_on(params, name):
            kept = cut(scores, getattr(params, name))
            removed = (scores > float("-inf")) & ~kept & is_valid
            scores = scores.masked_fill(removed, float("-inf"))
            yield name, removed
