"""Numba's draw returns the tokens of torch's draw.

Both compute scores and the bits of noise exactly. Logarithms, and masses of top-p and min-p, may
differ in their last bits. A token then differs where the two best sums are closer than NEAR, or
where a cut ends between two masses that are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from engine.device.openmp import parallel
from engine.kernels.numba.source.noise import log_noise, noise_bits, noise_key, second_key
from engine.protocol.generate import SamplingParams
from engine.sampling import noise
from engine.sampling.logits import GREEDY_BELOW
from engine.sampling.sampler import INVALID, DrawParams, draw, tempered
from tests.engine.sampling.test_draw import PLAIN
from tests.engine.sampling.test_plain_path import each_cut, rows_of
from tests.engine.sampling.test_sampler import SETTINGS, VARIED, as_often_as, distribution
from tests.support.sampling import logits_of, params_of, row, sample_rows

pytestmark = pytest.mark.skipif(parallel() is None, reason="this torch has no OpenMP threads")

CLOSE = {"rtol": 2e-7, "atol": 2e-7}  # of torch's logarithms
NEAR = 1e-5  # nats: scores up to 60 have fp32 steps of 4e-6
LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 9},
    {"top_k": 300},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 0.3},
    {"min_p": 0.001, "top_p": 0.8},
    {"min_p": 0.05, "top_k": 20},
    {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
    {"top_k": 2, "top_p": 0.9},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 50.0, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 700, "top_p": 0.99},
]


@pytest.fixture(autouse=True, params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@njit
def _noise_of(seed, position, token):  # type: ignore[no-untyped-def]
    key = noise_key(seed, position)
    bits = noise_bits(token, key, second_key(key))
    return bits, log_noise(bits)


@njit
def _log_noise(bits):  # type: ignore[no-untyped-def]
    return log_noise(bits)


def test_noise_has_the_bits_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (20,), generator=generator)
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    positions = torch.randint(0, 2**40, (20,), generator=generator)
    tokens = torch.randint(0, 300_000, (50,), generator=generator, dtype=torch.int32)
    bits = noise.noise_bits(seeds, positions, tokens)
    logs = noise.exponential_noise(seeds, positions, tokens).log()
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        found = [_noise_of(seed, position, np.int32(token)) for token in tokens.tolist()]
        assert [each[0] for each in found] == bits[i].tolist()
        torch.testing.assert_close(torch.tensor([each[1] for each in found]), logs[i], **CLOSE)


@pytest.mark.parametrize("bits", [0, 1, 2, 2**23, 2**24 + 1, 2**30, 2**31 - 300, 2**31 - 1])
def test_log_noise_of_extreme_bits_equals_the_logarithm_in_fp64(bits: int) -> None:
    uniform = (torch.tensor(bits).float() + 0.5) * 2.0**-31
    exact = -math.log1p(-float(uniform)) if uniform < 1 else 32.0
    assert float(_log_noise(np.int32(bits))) == pytest.approx(math.log(exact), rel=1e-6, abs=2e-7)


def is_near(logits: torch.Tensor, params: DrawParams, one: int, other: int) -> bool:
    """Whether two tokens of a row [1, V] have nearly the same sum of score and noise."""
    scores = tempered(logits, params)[0, [one, other]]
    drawn = noise.exponential_noise(params.seeds, params.positions, torch.tensor([one, other]))
    sums = scores - drawn.log()[0]
    return abs(float(sums[0] - sums[1])) < NEAR


def assert_equal_draws(
    logits: torch.Tensor, params: DrawParams, *, most: int = 0, static: bool = True
) -> None:
    """Assert that all but `most` tokens equal the reference's, and the others are near.

    The reference ranks equally likely tokens by their ids only if it is `static`.
    """
    before = logits.clone()
    due = draw(logits, params, static=static)
    found = draw(logits, params, "numba")
    assert found.dtype == torch.int64
    assert torch.equal(logits, before)
    different = (due != found).nonzero().flatten().tolist()
    assert len(different) <= most, (due[different], found[different])
    for index in different:
        alone = params.select(torch.tensor([index]))
        assert is_near(logits[index : index + 1], alone, int(due[index]), int(found[index]))


@pytest.mark.variants(8)
@pytest.mark.parametrize("vocabulary", [1, 7, 255, 256, 257, 1000, 4099])
@pytest.mark.parametrize("quantized", [False, True], ids=["distinct", "ties"])
def test_draw_mixed_rows_equal_reference(vocabulary: int, quantized: bool) -> None:
    count = 2 * len(LIMITS)
    logits = torch.stack([logits_of(vocabulary, 1.5, seed) for seed in range(count)])
    logits = (logits * 4).round() / 4 if quantized else logits
    rows = [row(3 + n % 5, seed=n * 2**33 - n, **LIMITS[n % len(LIMITS)]) for n in range(count)]
    assert_equal_draws(logits, params_of(rows))


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_draw_large_vocabulary_equals_reference(spread: float) -> None:
    """Blocks are skipped, and cuts gather from some blocks or from all."""
    count = len(LIMITS)
    logits = torch.stack([logits_of(49152, spread, seed) for seed in range(count)])
    params = params_of([row(7, seed=n, **limits) for n, limits in enumerate(LIMITS)])
    assert_equal_draws(logits, params, static=False)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_draw_of_many_rows_differs_hardly_ever(spread: float) -> None:
    """Of 2,000 tokens at most one differs, and only if the sums are near."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 1003, generator=generator) * spread
    rows = [row(n % 30, seed=n, **LIMITS[n % len(LIMITS)]) for n in range(2000)]
    assert_equal_draws(logits, params_of(rows), most=1, static=False)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 40])
def test_draw_row_is_independent_of_the_others(count: int) -> None:
    logits = torch.stack([logits_of(1500, 1.0, seed) for seed in range(count)])
    rows = [row(5, seed=n, **LIMITS[n % len(LIMITS)]) for n in range(count)]
    params = params_of(rows)
    together = draw(logits, params, "numba")
    wide = torch.cat([logits, logits], 1)[:, :1500]  # rows that are not dense
    assert draw(wide, params, "numba").tolist() == together.tolist()
    for index in range(count):
        alone = params.select(torch.tensor([index]))
        assert draw(logits[index : index + 1], alone, "numba").tolist() == [together[index]]


def test_draw_without_rows_returns_no_tokens() -> None:
    assert draw(torch.empty(0, 50), params_of([]), "numba").tolist() == []


@pytest.mark.parametrize("kind", ["one value", "masked", "all masked but one", "high", "low"])
def test_draw_unusual_logits_equal_reference(kind: str) -> None:
    logits = torch.stack([logits_of(700, 1.5, seed) for seed in range(len(LIMITS))])
    if kind == "one value":
        logits = torch.full_like(logits, -3.25)
    elif kind == "masked":
        logits[:, ::2] = -math.inf
        logits[-5:, 5:] = -math.inf
    elif kind == "all masked but one":
        logits[:, :600] = -math.inf
        logits[:, 601:] = -math.inf
    elif kind == "high":
        logits = (logits + 3000).round()
    else:
        logits = (logits * 100).round() - 5000
    params = params_of([row(7, seed=n, **limits) for n, limits in enumerate(LIMITS)])
    assert_equal_draws(logits, params)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}, {"temperature": 0}])
def test_draw_zeros_of_both_signs_tie(params: dict[str, float]) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]]).repeat(20, 1)
    assert_equal_draws(logits, params_of([row(seed=n, **params) for n in range(20)]))


def test_draw_temperatures_around_the_greedy_limit_equal_reference() -> None:
    logits = torch.stack([logits_of(300, 1.0, seed).round() for seed in range(6)])
    temperatures = [0.0, 0.99 * GREEDY_BELOW, GREEDY_BELOW, 2 * GREEDY_BELOW, 1e-3, 100.0]
    rows = [row(seed=n, temperature=each) for n, each in enumerate(temperatures)]
    assert_equal_draws(logits, params_of(rows))


@pytest.mark.parametrize(
    "broken", [math.nan, -math.nan, math.inf, -math.inf], ids=["nan", "-nan", "inf", "-inf"]
)
def test_draw_nonfinite_row_leaves_other_rows_unchanged(broken: float) -> None:
    logits = torch.stack([logits_of(600, 1.0, seed) for seed in range(2 * len(PLAIN))])
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN * 2)])
    due = draw(logits, params, static=True)
    logits[::2, 577 if broken != -math.inf else slice(None)] = broken
    due[::2] = INVALID
    assert draw(logits, params, "numba").tolist() == due.tolist()


@each_cut
def test_draw_rows_with_plain_cuts_equal_reference(name: str) -> None:
    logits = torch.stack([logits_of(2049, 1.0, seed) for seed in range(9)])
    due, _ = sample_rows(logits.clone(), rows_of(name, 9))
    found, _ = sample_rows(logits.clone(), rows_of(name, 9), kernels="numba")
    assert found.tolist() == due.tolist()


def test_sample_with_kernels_equals_reference() -> None:
    """A batch with penalties draws the same tokens."""
    logits = torch.stack([logits_of(200, 1.0, seed) for seed in range(len(VARIED))])
    rows = [row(5, seed=n, **setting) for n, setting in enumerate(VARIED)]
    due, _ = sample_rows(logits.clone(), rows)
    found, _ = sample_rows(logits.clone(), rows, kernels="numba")
    assert found.tolist() == due.tolist()


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p"])
def test_draw_frequencies_match_distribution(name: str) -> None:
    """20,000 seeds of one row, and the tokens are drawn as often as their probabilities demand."""
    logits, params = logits_of(32), SamplingParams(max_tokens=64, **SETTINGS[name])
    rows = params_of([row()])
    count = 20_000
    many = DrawParams(*(column.expand(count).contiguous() for column in rows))._replace(
        temperature=torch.full((count,), params.temperature),
        top_k=torch.full((count,), params.top_k, dtype=torch.int32),
        top_p=torch.full((count,), params.top_p),
        min_p=torch.full((count,), params.min_p),
        seeds=torch.arange(count),
    )
    drawn = draw(logits.repeat(count, 1), many, "numba")
    as_often_as(distribution(logits, params, [0], 1), drawn)
