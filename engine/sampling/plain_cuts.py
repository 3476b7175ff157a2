"""Cuts that need the whole distribution of a row: removed tokens, one row at a time.

`draw` computes temperature, top-k, top-p and min-p of a whole batch, on every device and in step
graphs. A row that uses another cut comes here before: a removed token has a logit of minus
infinity, and the draw goes on with the others. A row alone has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine.protocol.generate import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them would overflow
CANDIDATES = 256  # tokens that nearly always hold the typical ones
NEUTRAL = SamplingParams(max_tokens=1)


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
CUTS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typical_p": typical_p,
}
OF_DRAW = ("top_k", "top_p", "min_p")  # cuts that alone do not need this path


def needs_plain_cuts(params: SamplingParams) -> bool:
    """Whether a row has a cut that `draw` does not compute. Greedy rows need no cuts."""
    others = [name for name in CUTS if name not in OF_DRAW and _is_on(params, name)]
    return params.temperature >= GREEDY_BELOW and bool(others)


def _is_on(params: SamplingParams, name: str) -> bool:
    return getattr(params, name) != getattr(NEUTRAL, name)


def plain_cuts(logits: torch.Tensor, params: SamplingParams) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each cut's name, and the tokens [V] bool that it removes from a row's logits [V].

    Logits that are not finite stay, so that the draw finds them.
    """
    scores = logits.float() / params.temperature
    is_valid = torch.isfinite(scores.amax())
    for name, cut in CUTS.items():
        if _is_on(params, name):
            kept = cut(scores, getattr(params, name))
            removed = (scores > float("-inf")) & ~kept & is_valid
            scores = scores.masked_fill(removed, float("-inf"))
            yield name, removed
