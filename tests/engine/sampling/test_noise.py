"""Noise is a pure function of (seed, position, token), exponential and independent in each."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from engine.sampling.noise import exponential_noise

pytestmark = pytest.mark.usefixtures("one_thread")

LIKELY = 1e-4  # everything here is deterministic: a smaller p-value is a defect, not bad luck
INT64 = 2**63


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def draws(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return uniform draws [R, K], computed from the exponential ones."""
    return 1 - torch.exp(-exponential_noise(seeds, positions, tokens).double())


def test_noise_known_arguments_match_the_reference() -> None:
    """Kernels and other devices must draw the same values, including 32-bit wrap-around."""
    seeds = column(0, 1, -1, 2**62 + 7)
    noise = exponential_noise(seeds, column(0, 5, 2**17, 3), torch.tensor([0, 1, 150_000]))
    assert noise.dtype == torch.float32
    expected = reference(seeds.tolist(), [0, 5, 2**17, 3], [0, 1, 150_000])
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=0)


def reference(seeds: list[int], positions: list[int], tokens: list[int]) -> list[list[float]]:
    """Compute the same function with Python integers."""

    def mix(h: int) -> int:
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = ((h ^ (h >> shift)) * multiplier) % 2**32
        return h ^ (h >> 16)

    def noise(seed: int, position: int, token: int) -> float:
        key = mix((seed % 2**32 + position * 0x9E3779B1) % 2**32)
        key = mix(key ^ (seed % 2**64 >> 32))
        h = (mix((token * 0x9E3779B1) % 2**32 ^ key) + mix((key + 0x9E3779B1) % 2**32)) % 2**32
        uniform = torch.tensor(float(mix(h) % 2**31) + 0.5).mul(2.0**-31)
        return float(-torch.log1p(-uniform))

    return [[noise(s, p, t) for t in tokens] for s, p in zip(seeds, positions, strict=True)]


def test_noise_depends_on_its_arguments_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-INT64, INT64 - 1, (50,), generator=generator)
    positions = torch.randint(0, 100_000, (50,), generator=generator)
    tokens = torch.randperm(1000, generator=generator)[:64]
    whole = exponential_noise(seeds, positions, tokens)
    order = torch.randperm(50, generator=generator)
    assert torch.equal(exponential_noise(seeds[order], positions[order], tokens), whole[order])
    for row in range(50):
        alone = exponential_noise(seeds[row : row + 1], positions[row : row + 1], tokens)
        assert torch.equal(alone[0], whole[row])
    places = torch.randperm(64, generator=generator)[:9]
    assert torch.equal(exponential_noise(seeds, positions, tokens[places]), whole[:, places])
    each_row_its_own = tokens.expand(50, 64).contiguous().to(torch.int32)
    assert torch.equal(exponential_noise(seeds, positions, each_row_its_own), whole)


def test_noise_does_not_modify_its_arguments() -> None:
    arguments = column(3, 4), column(5, 6), torch.arange(7, dtype=torch.int32)
    before = [argument.clone() for argument in arguments]
    exponential_noise(*arguments)
    assert all(map(torch.equal, arguments, before))


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_along_each_axis_is_exponential(axis: str) -> None:
    count, one = 100_000, torch.ones(1, dtype=torch.int64)
    along = torch.arange(count)
    if axis == "token":
        noise = exponential_noise(one * 77, one * 5, along)[0]
    elif axis == "seed":
        noise = exponential_noise(along, one.expand(count) * 9, column(42))[:, 0]
    else:
        noise = exponential_noise(one.expand(count) * 123, along, column(42))[:, 0]
    assert noise.min() > 0
    assert stats.kstest(noise.double().numpy(), "expon").pvalue > LIKELY


NEIGHBOURS = [
    (seed, position, token)
    for seed, position, token in itertools.product((-1, 0, 1), repeat=3)
    if (seed, position, token) > (0, 0, 0)
]


@pytest.mark.parametrize("step", [*NEIGHBOURS, (2**32, 0, 0), (0, 64, 0), (0, 0, 256)])
def test_noise_of_neighbours_is_independent(step: tuple[int, int, int]) -> None:
    """Chi-square over a 16 x 16 table of the draws at (s, p, t) and one step away.

    The choices of one request have neighbouring seeds; an answer has neighbouring positions.
    """
    generator = torch.Generator().manual_seed(2)
    seeds = torch.randint(-(2**40), 2**40, (20_000,), generator=generator)
    positions = torch.randint(64, 4096, (20_000,), generator=generator)
    tokens = torch.randint(300, 32_000, (20_000, 8), generator=generator)
    first = draws(seeds, positions, tokens)
    second = draws(seeds + step[0], positions + step[1], tokens + step[2])
    cells = (first * 16).long() * 16 + (second * 16).long()
    observed = torch.bincount(cells.flatten(), minlength=256).numpy()
    assert stats.chisquare(observed).pvalue > LIKELY


def test_noise_small_draws_have_expected_frequency() -> None:
    """The smallest draws decide a sample, so the lower tail must be exact too."""
    noise = exponential_noise(torch.arange(2000), torch.arange(2000) % 77, torch.arange(2000))
    for limit in (1e-2, 1e-3, 1e-4, 1e-5):
        expected = noise.numel() * limit
        found = int((noise < limit).sum())
        assert abs(found - expected) < 4.5 * expected**0.5, limit
    assert torch.isfinite(noise.log()).all()


def test_noise_extreme_bits_give_finite_positive_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token that is the only one left must win with any draw."""
    extremes = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr("engine.sampling.noise.noise_bits", lambda *arguments: extremes)
    smallest, greatest = exponential_noise(column(1), column(1), torch.arange(2))[0].tolist()
    assert 0 < smallest < 1e-9
    assert 20 < greatest < 100
