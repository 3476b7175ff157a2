"""Penalties, bias and banned tokens against their formulas; filters against brute force."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.generate import SamplingParams
from engine.sampling.logits import adjust, adjusts_logits, cut, mask
from tests.support.thorough import examples

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 23


def adjusted_by_hand(
    logits: list[float], params: SamplingParams, tokens: list[int], prompt_length: int
) -> list[float]:
    """Apply the formulas of SamplingParams token by token."""
    result = []
    answer = tokens[prompt_length:]
    bias = dict(params.logit_bias)
    for token, value in enumerate(logits):
        if token in tokens:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        if token in answer:
            value -= params.presence_penalty
            value -= params.frequency_penalty * answer.count(token)
        value += bias.get(token, 0.0)
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            value = -math.inf
        if token in params.stop_token_ids and len(answer) < params.min_tokens:
            value = -math.inf
        result.append(value)
    banned = list(result)
    for *start, last in params.banned_sequences:
        if answer[len(answer) - len(start) :] == start and len(start) <= len(answer):
            banned[last] = -math.inf
    if max(banned) == -math.inf:
        return result
    return banned


token_ids = st.integers(0, VOCAB - 1)


@settings(derandomize=True, max_examples=examples(150), deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB),
    tokens=st.lists(token_ids, min_size=1, max_size=20),
    answer=st.integers(0, 20),
    penalties=st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 100)),
    bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=5),
    stops=st.sets(token_ids, max_size=4),
    allowed=st.sets(token_ids, max_size=6),
    min_tokens=st.integers(0, 20),
    data=st.data(),
)
def test_adjust_random_params_matches_formulas(
    logits: list[float],
    tokens: list[int],
    answer: int,
    penalties: tuple[float, float, float],
    bias: dict[int, float],
    allowed: set[int],
    stops: set[int],
    min_tokens: int,
    data: st.DataObject,
) -> None:
    prompt_length = max(len(tokens) - answer, 1)
    presence, frequency, repetition = penalties
    # Sequences of known tokens, so that many of them are nearly complete.
    known = st.lists(st.sampled_from(tokens) | token_ids, min_size=1, max_size=3)
    endings = st.integers(1, 3).map(lambda length: tokens[-length:])
    completed = st.tuples(endings, token_ids).map(lambda pair: [*pair[0], pair[1]])
    banned = data.draw(st.lists(known | completed, max_size=5))
    params = SamplingParams(
        64,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        stop_token_ids=tuple(sorted(stops)),
        allowed_token_ids=tuple(sorted(allowed)),
        min_tokens=min_tokens,
        banned_sequences=tuple(map(tuple, banned)),
    )
    row = torch.tensor(logits)
    adjust(row, params, torch.tensor(tokens, dtype=torch.int32), prompt_length)
    due = torch.tensor(adjusted_by_hand(logits, params, tokens, prompt_length))
    torch.testing.assert_close(row, due, rtol=1e-5, atol=1e-4)
    if not adjusts_logits(params):
        assert torch.equal(row, torch.tensor(logits))


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.01},
        {"logit_bias": ((1, 0.5),)},
        {"allowed_token_ids": (3,)},
        {"min_tokens": 1},
        {"banned_sequences": ((1, 2),)},
    ],
    ids=str,
)
def test_adjusts_logits_is_true_for_each_adjusting_parameter(change: dict[str, float]) -> None:
    assert not adjusts_logits(SamplingParams(8, temperature=0.3, top_k=3, top_p=0.2, min_p=0.1))
    assert adjusts_logits(SamplingParams(8, **change))


def banned(sequences: tuple[tuple[int, ...], ...], answer: list[int], size: int = 4) -> list[int]:
    """Return the tokens that cannot follow `answer`, behind a prompt of tokens 1 and 2."""
    row = torch.zeros(size)
    tokens = torch.tensor([1, 2, *answer], dtype=torch.int32)
    adjust(row, SamplingParams(8, banned_sequences=sequences), tokens, 2)
    return (row == -math.inf).nonzero().flatten().tolist()


def test_adjust_banned_sequence_bans_only_its_last_token_behind_the_others() -> None:
    assert banned(((3,),), []) == [3]
    assert banned(((1, 3),), [1]) == [3]
    assert banned(((1, 3),), [1, 1]) == [3]
    assert banned(((1, 3),), [3]) == []
    assert banned(((1, 2, 3), (0,)), [0, 1, 2]) == [0, 3]
    assert banned(((2, 3),), []) == [], "the prompt may contain its start"
    assert banned(((2, 0, 3),), [0]) == []
    assert banned(((0, 0, 0), (1, 0), (0, 0)), [0, 0]) == [0]
    assert banned(((1, 0), (2, 0)), [1]) == [0], "one of two with the same end is complete"


def test_adjust_banned_sequences_that_leave_nothing_are_not_applied() -> None:
    assert banned(((0,), (1,), (2,), (3,)), []) == []
    params = SamplingParams(
        8, allowed_token_ids=(1, 2), stop_token_ids=(2,), min_tokens=5, banned_sequences=((1,),)
    )
    row = torch.zeros(4)
    adjust(row, params, torch.tensor([0], dtype=torch.int32), 1)
    assert row.tolist() == [-math.inf, 0, -math.inf, -math.inf]


def kept_by_hand(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """Return which tokens the filters keep. `probs` is sorted in descending order."""
    within = probs[:top_k] if top_k else probs
    mass = math.fsum(within)
    before, stays = 0.0, []
    for p in within:
        stays.append(before < top_p * mass and p >= min_p * probs[0])
        before += p
    stays[0] = True
    return stays + [False] * (len(probs) - len(within))


def test_keep_mixed_rows_matches_brute_force() -> None:
    """Probabilities and limits are binary fractions, so both sides compute exactly."""
    rng = random.Random(4)
    for _ in range(300):
        vocabulary, rows = rng.choice((1, 2, 7, 40)), []
        for _ in range(rng.randint(1, 8)):
            weights = [2.0 ** -rng.randint(0, 8) for _ in range(vocabulary)]
            scale = 2.0 ** -math.ceil(math.log2(sum(weights)) + 1e-9)
            probs = sorted((w * scale for w in weights), reverse=True)
            top_k = rng.choice((0, 1, 2, 5, vocabulary, vocabulary + 9))
            # Without top-k, top-p is a share of the whole distribution, not only of the candidates.
            missing = 0.0 if top_k else 1 - sum(probs)
            rows.append((probs, missing, top_k, rng.randint(0, 64) / 64, rng.randint(0, 16) / 16))
        stays = cut(
            torch.tensor([row[0] for row in rows]),
            torch.tensor([float(row[2]) for row in rows]),
            torch.tensor([row[3] for row in rows]),
            torch.tensor([row[4] for row in rows]),
        )
        for row, (probs, missing, top_k, top_p, min_p) in enumerate(rows):
            due = kept_by_hand([*probs, *([missing] if missing else [])], top_k, top_p, min_p)
            assert stays[row].tolist() == due[: len(probs)], rows[row]


def test_keep_strictest_filters_keeps_the_most_likely_token() -> None:
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25]] * 3)
    stays = cut(probs, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0]), torch.ones(3))
    assert stays.tolist() == [[True, False, False, False]] * 2 + [[True] * 4]


def test_keep_top_p_of_one_keeps_all_despite_rounding() -> None:
    probs = torch.tensor([[1.0, 1e-9, 1e-9]])
    zero = torch.zeros(1)
    assert cut(probs, zero, torch.ones(1), zero).tolist() == [[True] * 3]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100])
def test_mask_keeps_only_allowed_tokens(vocabulary: int) -> None:
    """The mask has one bit per token, the lowest bit of each word first."""
    generator = torch.Generator().manual_seed(vocabulary)
    is_allowed = torch.rand(4, vocabulary, generator=generator) < 0.5
    words = torch.zeros(4, -(-vocabulary // 32), dtype=torch.int64)
    for row, token in is_allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    allowed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    logits = torch.randn(6, vocabulary, generator=generator)
    rows = torch.tensor([5, 0, 2, 3])
    expected = logits.clone()
    for row, keeps in zip(rows.tolist(), is_allowed, strict=True):
        expected[row].masked_fill_(~keeps, -math.inf)
    mask(logits, rows, allowed)
    assert torch.equal(logits, expected)


def test_mask_revives_allowed_tokens_if_all_are_banned() -> None:
    """Otherwise a row without any possible token would end its request with an error."""
    logits = torch.tensor([[1.0, -math.inf, -math.inf, 2.0], [math.nan] * 4])
    allowed = torch.tensor([[0b0110], [0b0110]], dtype=torch.int32)
    mask(logits, torch.tensor([0, 1]), allowed)
    assert logits[0].tolist() == [-math.inf, 0, 0, -math.inf]
    assert logits[1, 1:3].isnan().all()
