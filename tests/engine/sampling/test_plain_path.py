"""Rows with a cut that `draw` does not know, through the whole pipeline; the cases are declared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.protocol.generate import CUT_CODES, KEPT, Explain, SamplingParams
from engine.protocol.sampling_parameters import CUT_NAMES, DEFAULTS
from engine.sampling.explain import PendingExplanation
from engine.sampling.logits import OF_DRAW, PLAIN_CUTS
from engine.sampling.sampler import CANDIDATES, INVALID, draw, is_special
from tests.engine.sampling.test_plain_cuts import REFERENCES, VALUES, Numbers
from tests.engine.sampling.test_sampler import VARIED, as_often_as
from tests.support.sampling import Row, logits_of, row, sample_rows

pytestmark = pytest.mark.usefixtures("one_thread")

OTHERS = [name for name in PLAIN_CUTS if name not in OF_DRAW]
each_cut = pytest.mark.parametrize("name", OTHERS)
WITH_OTHERS = {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02}


def steps_of(logits: torch.Tensor, params: SamplingParams) -> list[tuple[str, Numbers]]:
    """Return which tokens stay after each cut, in the declared order, in float64."""
    scores = logits.double().numpy() / params.temperature
    steps = []
    for name in CUT_NAMES:
        value = getattr(params, name)
        if value == DEFAULTS[name]:
            continue
        if name in REFERENCES:
            kept = REFERENCES[name](scores, value)
        else:
            probs = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            order = np.argsort(-probs, kind="stable")
            before = np.empty(len(probs))
            before[order] = np.concatenate([[0.0], probs[order].cumsum()[:-1]])
            kept = before < value if name == "top_p" else probs >= value * probs.max()
        scores = np.where(kept, scores, -math.inf)
        steps.append((name, np.isfinite(scores)))
    return steps


def shares_of(logits: torch.Tensor, params: SamplingParams) -> Numbers:
    kept = steps_of(logits, params)[-1][1]
    scores = np.where(kept, logits.double().numpy() / params.temperature, -math.inf)
    weights = np.exp(scores - scores.max())
    shares: Numbers = weights / weights.sum()
    return shares


def settings_of(name: str) -> list[dict[str, Any]]:
    value = VALUES[name][0]
    return [{name: value}, {name: value, "temperature": 0.6}, {name: value, **WITH_OTHERS}]


def rows_of(name: str, count: int) -> list[Row]:
    """Return rows of all kinds in turn: two in three have the cut."""
    kinds = [kind for pair in zip(settings_of(name) * 9, VARIED * 3, strict=False) for kind in pair]
    return [row(3 + n % 5, seed=n, **kinds[n % len(kinds)]) for n in range(count)]


@pytest.mark.variants(5)
@each_cut
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("vocabulary", [32, CANDIDATES * 2])
def test_rows_are_drawn_with_the_references_shares(name: str, number: int, vocabulary: int) -> None:
    draws, setting = 3000, settings_of(name)[number]
    logits = logits_of(vocabulary)
    drawn, _ = sample_rows(logits.repeat(draws, 1), [row(seed=s, **setting) for s in range(draws)])
    as_often_as(shares_of(logits, SamplingParams(1, **setting)), drawn)


@each_cut
@pytest.mark.parametrize("quantized", [False, True], ids=["distinct", "ties"])
def test_row_in_any_batch_gives_the_same_token(name: str, quantized: bool) -> None:
    logits = torch.stack([logits_of(20_000, 1.0, seed) for seed in range(45)])
    if quantized:
        logits = (logits * 8).round() / 8
    rows = rows_of(name, 45)
    together, _ = sample_rows(logits.clone(), rows)
    alone = [sample_rows(logits[n : n + 1].clone(), rows[n : n + 1])[0] for n in range(45)]
    assert together.tolist() == [int(token) for token in alone]
    order = torch.randperm(45, generator=torch.Generator().manual_seed(3))
    shuffled, _ = sample_rows(logits[order].clone(), [rows[n] for n in order.tolist()])
    assert shuffled.tolist() == together[order].tolist()


@each_cut
def test_row_of_a_captured_step_gives_the_same_token(name: str) -> None:
    logits = torch.stack([logits_of(2049, 1.0, seed) for seed in range(9)])
    due, _ = sample_rows(logits.clone(), rows_of(name, 9))
    found, _ = sample_rows(logits.clone(), rows_of(name, 9), static=True)
    assert found.tolist() == due.tolist()


@each_cut
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
def test_row_that_is_not_finite_stays_invalid(name: str, broken: float) -> None:
    logits = torch.stack([logits_of(500, 1.0, seed) for seed in range(6)])
    rows = rows_of(name, 6)
    healthy, _ = sample_rows(logits.clone(), rows)
    for victim in range(6):
        poisoned = logits.clone()
        poisoned[victim, slice(None) if broken == -math.inf else 77] = broken
        tokens, _ = sample_rows(poisoned, rows)
        assert tokens[victim] == INVALID
        others = [n for n in range(6) if n != victim]
        assert tokens[others].tolist() == healthy[others].tolist()


@each_cut
def test_greedy_row_needs_no_cut(name: str) -> None:
    params = SamplingParams(1, temperature=0.0, **{name: VALUES[name][0]})
    assert not is_special(params)
    assert is_special(SamplingParams(1, **{name: VALUES[name][0]}))


@each_cut
def test_bfloat16_logits_are_cut_in_fp32(name: str) -> None:
    logits = torch.stack([logits_of(600, 1.0, seed) for seed in range(9)]).bfloat16()
    rows = rows_of(name, 9)
    before = logits.clone()
    found, _ = sample_rows(logits, rows)
    assert found.tolist() == sample_rows(logits.float(), rows)[0].tolist()
    assert torch.equal(logits, before)


@each_cut
@pytest.mark.parametrize("number", range(3))
def test_final_logprobs_are_those_after_the_cut(name: str, number: int) -> None:
    setting = settings_of(name)[number]
    logits = logits_of(400)
    given = row(logprobs=20, final_logprobs=True, **setting)
    drawn, pending = sample_rows(logits.repeat(1, 1), [given])
    assert pending is not None
    found = pending.read()[0]
    shares = shares_of(logits, given.params)
    for token, logprob in [*found.top, (int(drawn[0]), found.logprob)]:
        assert math.exp(logprob) == pytest.approx(shares[token], abs=1e-6)


@each_cut
@pytest.mark.parametrize("number", range(3))
def test_explanation_names_what_removed_each_token(name: str, number: int) -> None:
    params = SamplingParams(1, seed=5, **settings_of(name)[number])
    logits = torch.stack([logits_of(300, 2.0, seed) for seed in range(4)])
    tokens = torch.zeros(4, dtype=torch.int32)
    positions = range(1, 5)
    rows = [Row(params, torch.zeros(at, dtype=torch.int32), 1) for at in positions]
    drawn, _ = sample_rows(logits.clone(), rows)
    explain = Explain(drawn.tolist(), params, 300)
    pending = PendingExplanation(1, explain, tokens, 1, 0)
    pending.launch(logits, draw)
    for values, token, found in zip(logits, drawn.tolist(), pending.read(), strict=True):
        wanted = np.full(300, KEPT)
        for cut, kept in steps_of(values, params):
            wanted[(wanted == KEPT) & ~kept] = CUT_CODES.index(cut)
        assert found.drawn == token
        assert wanted[found.ids].tolist() == found.cuts
        shares = np.exp(torch.log_softmax(values.double() / params.temperature, 0).numpy())
        kept = wanted == KEPT
        assert (found.kept, len(found.ids)) == (kept.sum(), 300)
        assert found.mass == pytest.approx(shares[kept].sum(), abs=1e-5)
        final = shares[kept] / shares[kept].sum()
        assert found.final_entropy == pytest.approx(-(final * np.log2(final)).sum(), abs=1e-4)
