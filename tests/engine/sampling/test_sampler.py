"""The sampler against a simple implementation: frequencies, and independence of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from engine.protocol.generate import SamplingParams, TokenLogprobs
from engine.sampling.sampler import CANDIDATES, INVALID
from tests.support.sampling import Row, logits_of, row, sample_rows

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 20_000
LIKELY = 1e-4  # deterministic: a smaller p-value is a defect, not bad luck


def distribution(
    logits: torch.Tensor, params: SamplingParams, tokens: list[int], prompt: int
) -> np.ndarray:
    """Compute the distribution that SamplingParams specifies, in float64, token by token."""
    scores, answer = logits.double().numpy().copy(), tokens[prompt:]
    for token in set(tokens):
        factor = params.repetition_penalty
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token in set(answer):
        scores[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(answer) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -math.inf
    weights = np.exp((scores - scores.max()) / params.temperature)
    probs = weights / weights.sum()
    order = np.argsort(-probs, kind="stable")
    keep = order[: params.top_k or len(order)]
    share = probs[keep] / probs[keep].sum()
    keep = keep[np.concatenate([[0.0], share.cumsum()[:-1]]) < params.top_p]
    keep = keep[probs[keep] >= params.min_p * probs[order[0]]]
    final = np.zeros_like(probs)
    final[keep] = probs[keep] / probs[keep].sum()
    return final


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 7},
    "top-p": {"temperature": 1.0, "top_p": 0.85},
    "min-p": {"temperature": 1.5, "min_p": 0.08},
    "everything": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((3, 2.0), (4, -100.0)),
        "min_tokens": 9,
        "stop_token_ids": (5, 6),
    },
}


@pytest.mark.variants(2)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_sample_many_requests_matches_the_distribution(setting: dict[str, Any]) -> None:
    tokens, prompt = [1, 2, 2, 9, 9, 9, 10], 2
    rows = [row(tokens=tokens, prompt=prompt, seed=s, **setting) for s in range(DRAWS)]
    check_frequencies(rows, tokens, prompt)


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p"])
def test_sample_positions_of_one_request_matches_the_distribution(name: str) -> None:
    params = SamplingParams(max_tokens=64, **SETTINGS[name])
    known = torch.zeros(DRAWS, dtype=torch.int32)
    check_frequencies([Row(params, known[: p + 1], 1) for p in range(DRAWS)], [0], 1)


def check_frequencies(rows: list[Row], tokens: list[int], prompt: int) -> None:
    logits, params = logits_of(32), rows[0].params
    drawn, _ = sample_rows(logits.repeat(DRAWS, 1), rows)
    as_often_as(distribution(logits, params, tokens, prompt), drawn)


def as_often_as(shares: np.ndarray, drawn: torch.Tensor) -> None:
    """Assert with a chi-square test that the tokens were drawn with these shares."""
    counts, expected = np.bincount(drawn.numpy(), minlength=len(shares)), shares * len(drawn)
    assert counts[expected == 0].sum() == 0, "a token that was filtered out was drawn"
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    due = np.append(expected[often], expected[~often].sum())
    assert stats.chisquare(observed[due > 0], due[due > 0]).pvalue > LIKELY


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("vocabulary", [32, CANDIDATES * 2])
def test_final_logprobs_are_those_of_the_draw(setting: dict[str, Any], vocabulary: int) -> None:
    tokens, prompt = [1, 2, 2, 9, 9, 9, 10], 2
    given = row(tokens=tokens, prompt=prompt, logprobs=20, final_logprobs=True, **setting)
    plain = row(tokens=tokens, prompt=prompt, logprobs=20, **setting)
    logits = logits_of(vocabulary)
    drawn, pending = sample_rows(logits.repeat(2, 1), [given, plain])
    assert pending is not None
    found = pending.read()
    wanted = distribution(logits, given.params, tokens, prompt)
    for token, logprob in [*found[0].top, (int(drawn[0]), found[0].logprob)]:
        assert math.exp(logprob) == pytest.approx(wanted[token], abs=1e-6)
    own = torch.log_softmax(logits, dim=-1)
    assert found[1].logprob == pytest.approx(float(own[drawn[1]]), abs=1e-5)


def test_final_logprobs_of_a_greedy_row_are_certain() -> None:
    logits = logits_of(32)
    given = row(temperature=0.0, logprobs=2, final_logprobs=True)
    [drawn], pending = sample_rows(logits.repeat(1, 1), [given])
    assert pending is not None
    found = pending.read()[0]
    assert found.logprob == 0.0
    assert found.top[0] == (int(drawn), 0.0)
    assert found.top[1][1] == -math.inf


VARIED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 400},
    {"temperature": 1.7, "top_p": 0.9999},
    {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": ((7, 9.0),)},
]


@pytest.mark.parametrize("quantized", [False, True], ids=["distinct", "ties"])
def test_sample_row_in_any_batch_gives_the_same_token(quantized: bool) -> None:
    """Also with ties, as in bf16 logits: a wider filter of another row must not reorder them."""
    logits = torch.stack([logits_of(20_000, 1.0, seed) for seed in range(45)])
    if quantized:
        logits = (logits * 8).round() / 8
    rows = [row(3 + n % 5, seed=n, **VARIED[n % len(VARIED)]) for n in range(45)]
    together, _ = sample_rows(logits.clone(), rows)
    alone = [sample_rows(logits[n : n + 1].clone(), rows[n : n + 1])[0] for n in range(45)]
    assert together.tolist() == [int(token) for token in alone]
    order = torch.randperm(45, generator=torch.Generator().manual_seed(3))
    shuffled, _ = sample_rows(logits[order].clone(), [rows[n] for n in order.tolist()])
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"top_k": 1000},
        {"top_k": 1000, "top_p": 0.9},
        {"min_p": 0.01},
    ],
    ids=str,
)
def test_sample_filter_keeping_more_than_candidates_is_exact(setting: dict[str, Any]) -> None:
    """With a nearly flat distribution, the kept set must still be exact."""
    draws = 2000
    logits = logits_of(3000, 0.05)
    params = SamplingParams(max_tokens=1, **setting)
    due = distribution(logits, params, [0], 1)
    kept = int((due > 0).sum())
    assert kept > CANDIDATES
    drawn, _ = sample_rows(logits.repeat(draws, 1), [row(seed=s, **setting) for s in range(draws)])
    # At the limit of top-p, fp32 and float64 may differ by one token.
    rank = np.argsort(np.argsort(-logits.numpy(), kind="stable"))[drawn.numpy()]
    assert rank.max() <= kept + 1
    eighths = np.bincount(rank * 8 // (kept + 2), minlength=8)
    assert eighths.min() > draws / 8 * 0.75, "the tail of the kept set is drawn too rarely"


def sampled(
    logits: torch.Tensor, rows: list[Row]
) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
    tokens, pending = sample_rows(logits, rows)
    if pending is None:
        return tokens, [None] * len(rows)
    found = pending.read()
    return tokens, [found.get(n) for n in range(len(rows))]


def test_sample_greedy_with_ties_takes_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-5.0, -7.0, -6.0, -5.5]])
    tokens, logprobs = sampled(logits, [row(temperature=0.0), row(temperature=0.0, seed=9)])
    assert tokens.tolist() == [1, 0]
    assert logprobs == [None, None]


def test_sample_greedy_uses_adjusted_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 3)
    rows = [
        row(temperature=0.0, logit_bias=((1, -5.0),)),
        row(temperature=0.0),
        row(temperature=0.0, stop_token_ids=(1,), min_tokens=3),
    ]
    assert sample_rows(logits, rows)[0].tolist() == [2, 1, 2]


@pytest.mark.parametrize("temperature", [1e-4, 1e-9, 1e-30, 1e-44, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_sample_tiny_temperature_is_greedy(temperature: float, filters: dict[str, Any]) -> None:
    logits = torch.stack([logits_of(50, 20.0, seed) for seed in range(40)])
    highest = logits.argmax(dim=-1)
    rows = [row(seed=s, temperature=temperature, **filters) for s in range(40)]
    assert torch.equal(sample_rows(logits, rows)[0], highest)


def test_sample_strictest_filters_are_greedy() -> None:
    logits = torch.stack([logits_of(300, 0.1, seed) for seed in range(60)])
    highest = logits.argmax(dim=-1)
    for setting in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}):
        rows = [row(seed=s, **setting) for s in range(60)]
        assert torch.equal(sample_rows(logits.clone(), rows)[0], highest), setting


def test_sample_before_min_tokens_draws_no_stop_token() -> None:
    logits = torch.zeros(4000, 4)
    logits[:, 2] = 8.0
    banned = {"stop_token_ids": (2,), "min_tokens": 3}
    early = [row(tokens=[0, 1, 1], prompt=1, seed=s, **banned) for s in range(2000)]
    late = [row(tokens=[0, 1, 1, 1], prompt=1, seed=s, **banned) for s in range(2000)]
    drawn, _ = sample_rows(logits, early + late)
    assert 2 not in drawn[:2000]
    assert (drawn[2000:] == 2).float().mean() > 0.99


def test_sample_logprobs_are_those_of_the_model() -> None:
    """Logprobs of the drawn and the most likely tokens, before penalties, bias and temperature."""
    logits = logits_of(40)
    due = torch.log_softmax(logits.double(), dim=-1)
    setting = {"temperature": 0.3, "logit_bias": ((8, 50.0),), "repetition_penalty": 3.0}
    tokens, logprobs = sampled(
        logits.repeat(5, 1),
        [row(logprobs=k, **setting) for k in (-1, 0, 3)]
        + [row(logprobs=5, temperature=0.0), row(logprobs=99, top_k=2)],
    )
    assert logprobs[0] is None
    assert tokens[:3].tolist() == [8, 8, 8]
    for index, size in ((1, 0), (2, 3), (3, 5), (4, 40)):
        entry = logprobs[index]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(due[tokens[index]]), abs=1e-5)
        best, ids = due.topk(size)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-5)


def test_sample_logprobs_of_named_tokens_keep_their_order() -> None:
    logits = logits_of(40)
    due = torch.log_softmax(logits.double(), dim=-1)
    named = (3, 39, 0)
    tokens, logprobs = sampled(
        logits.repeat(2, 1),
        [row(logprobs=3, logprob_token_ids=named, logit_bias=((8, 50.0),)), row(logprobs=3)],
    )
    first, second = logprobs
    assert first is not None
    assert second is not None
    assert int(tokens[0]) == 8
    assert first.logprob == pytest.approx(float(due[8]), abs=1e-5)
    assert [token for token, _ in first.top] == list(named)
    expected = [float(due[token]) for token in named]
    assert [value for _, value in first.top] == pytest.approx(expected, abs=1e-5)
    assert [token for token, _ in second.top] == due.topk(3).indices.tolist()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
def test_sample_nonfinite_row_leaves_other_rows_unchanged(broken: float) -> None:
    logits = torch.stack([logits_of(500, 1.0, seed) for seed in range(27)])
    rows = [row(seed=n, logprobs=2, **VARIED[n % len(VARIED)]) for n in range(27)]
    healthy, scores = sampled(logits.clone(), rows)
    for victim in range(len(VARIED)):
        poisoned = logits.clone()
        if broken == -math.inf:
            poisoned[victim] = broken  # a single -inf is a mask; a row of -inf is an error
        else:
            poisoned[victim, 77] = broken
        tokens, logprobs = sampled(poisoned, rows)
        assert tokens[victim] == INVALID
        others = [n for n in range(27) if n != victim]
        assert tokens[others].tolist() == healthy[others].tolist()
        assert [logprobs[n] for n in others] == [scores[n] for n in others]


def test_sample_masked_tokens_are_never_drawn() -> None:
    logits = torch.zeros(3000, 10)
    logits[:, 3:] = -math.inf
    for setting in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.1}):
        rows = [row(seed=s, **setting) for s in range(3000)]
        drawn, _ = sample_rows(logits.clone(), rows)
        assert set(drawn.tolist()) == {0, 1, 2}


def test_sample_bf16_logits_matches_their_fp32_values() -> None:
    """Greedy rows stay in bf16; sampling, adjustments and logprobs compute in fp32."""
    logits = torch.stack([logits_of(600, seed=i) for i in range(4)]).bfloat16()
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"temperature": 0.7, "top_p": 0.8, "seed": 5, "logprobs": 2},
    ]
    for chosen in ([0], [0, 1, 2, 3]):
        rows = [row(**settings[i]) for i in chosen]
        tokens, scored = sampled(logits[chosen].clone(), rows)
        wide, wide_scored = sampled(logits[chosen].float(), rows)
        assert torch.equal(tokens, wide)
        assert scored == wide_scored


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logit_bias": ((7, 0.001), (3, 0.002))},
        {"temperature": 0.0, "repetition_penalty": 1.001},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
    ],
    ids=str,
)
def test_sample_bf16_logits_are_adjusted_in_fp32(params: dict[str, Any]) -> None:
    """Many logits are equal in bf16; a small bias must still separate them."""
    logits = torch.stack([logits_of(64, 0.05, seed) for seed in range(200)]).bfloat16() + 4
    rows = [row(tokens=[seed % 64, 3], seed=seed, **params) for seed in range(len(logits))]
    due, _ = sample_rows(logits.float(), rows)
    found, _ = sample_rows(logits.clone(), rows)
    assert torch.equal(found, due)


def test_sample_with_mask_draws_only_allowed_tokens() -> None:
    """The mask comes after the penalties and before the cuts: top-k counts allowed tokens alone."""
    logits = torch.stack([logits_of(64, 1.0, seed) for seed in range(200)])
    allowed = torch.tensor([[0b1011, 1 << 8]], dtype=torch.int32).expand(200, 2)
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {}]
    rows = [row(seed=n, logit_bias=((2, 99.0),), **settings[n % 4]) for n in range(200)]
    drawn, _ = sample_rows(logits, rows, masks=(torch.arange(200), allowed.contiguous()))
    assert set(drawn.tolist()) == {0, 1, 3, 40}
