"""Cuts of single rows against references in NumPy, and the same row in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.protocol.generate import CUT_CODES
from engine.protocol.sampling_parameters import CUT_NAMES
from engine.sampling.logits import OF_DRAW, PLAIN_CUTS
from tests.support.sampling import logits_of

pytestmark = pytest.mark.usefixtures("one_thread")

Numbers = np.ndarray[Any, Any]


def top_n_sigma(scores: Numbers, count: float) -> Numbers:
    """As llama.cpp's `llama_sampler_top_n_sigma_apply`."""
    if count <= 0 or len(scores) <= 1:
        return np.ones(len(scores), bool)
    finite = scores[np.isfinite(scores)]
    return scores >= finite.max() - count * finite.std()


def top_k(scores: Numbers, count: float) -> Numbers:
    order = np.argsort(-scores, kind="stable")
    kept = np.zeros(len(scores), bool)
    kept[order[: int(count)]] = True
    return kept


def typical_p(scores: Numbers, share: float) -> Numbers:
    """As llama.cpp's `llama_sampler_typical_apply`."""
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    with np.errstate(divide="ignore"):
        information = -np.log(probs)
    positive = probs > 0
    entropy = (probs[positive] * information[positive]).sum()
    kept, mass = np.zeros(len(scores), bool), 0.0
    for token in np.argsort(np.abs(information - entropy), kind="stable"):
        kept[token] = True
        mass += probs[token]
        if mass > share:
            break
    return kept


# By parameter: which of some scores [V] in float64 stay with a value.
REFERENCES: dict[str, Callable[[Numbers, float], Numbers]] = {
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typical_p": typical_p,
}
VALUES: dict[str, list[float]] = {
    "top_n_sigma": [2.05, 0, 0.1, 1, 3, 100],
    "top_k": [1, 3, 40, 10_000],
    "typical_p": [0.9, 0, 0.05, 0.6, 0.9999],
}
CASES = [(name, value) for name, values in VALUES.items() for value in values]


def test_cuts_have_a_function_a_code_and_the_declared_order() -> None:
    assert {*PLAIN_CUTS, *OF_DRAW} == set(CUT_NAMES)
    assert [name for name in CUT_NAMES if name in PLAIN_CUTS] == list(PLAIN_CUTS)
    assert set(CUT_CODES) == {*CUT_NAMES, "kept", "ban", "grammar"}
    assert set(PLAIN_CUTS) == set(REFERENCES) == set(VALUES)


@pytest.mark.parametrize(("name", "value"), CASES)
@pytest.mark.parametrize("spread", [0.05, 2.0, 9.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 5000])
def test_cut_keeps_what_the_reference_keeps(
    name: str, value: float, spread: float, vocabulary: int
) -> None:
    scores = logits_of(vocabulary, spread, seed=vocabulary)
    for banned in ([], [0], range(0, vocabulary, 3)):
        if len(banned) < vocabulary:
            scores[list(banned)] = -torch.inf
            finite = torch.isfinite(scores).numpy()
            wanted = REFERENCES[name](scores.double().numpy(), value) & finite
            assert (PLAIN_CUTS[name](scores, value).numpy() & finite).tolist() == wanted.tolist()


def test_top_k_with_ties_keeps_the_lowest_ids() -> None:
    scores = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert PLAIN_CUTS["top_k"](scores, 3).tolist() == [True, True, True, False, False]
