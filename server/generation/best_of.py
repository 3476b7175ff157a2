"""best_of: more answers are generated than returned. The likeliest of each prompt are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from server.generation.events import ChoiceEvents
from server.generation.prepare import PreparedRequest


def with_candidates(prepared: PreparedRequest) -> PreparedRequest:
    """Return the request that generates all candidates of `prepared` as choices of their own.

    A request without best_of is returned as it is.
    """
    options = prepared.options
    if options.num_candidates == options.n:
        return prepared
    # The engine returns the logprob of each token, also if the client asks for none.
    params = [
        msgspec.structs.replace(given, logprobs=max(given.logprobs, 0)) for given in prepared.params
    ]
    options = replace(options, n=options.num_candidates, best_of=None)
    return replace(prepared, options=options, params=params)


def best_answers(
    prepared: PreparedRequest, candidates: Sequence[ChoiceEvents], scores: Sequence[float]
) -> list[ChoiceEvents]:
    """Return the n candidates of each prompt with the highest score, the best first.

    `scores` has the mean logprob of each candidate. Of equal candidates the first is better.
    """
    options = prepared.options
    if options.num_candidates == options.n:
        return list(candidates)
    answers: list[ChoiceEvents] = []
    for first in range(0, len(candidates), options.num_candidates):
        group = range(first, first + options.num_candidates)
        ranked = sorted(group, key=lambda index: scores[index], reverse=True)
        for index in ranked[: options.n]:
            answers.append(replace(candidates[index], index=len(answers)))
    return answers
