"""The Kullback-Leibler divergence against SciPy, and at its edges."""

from __future__ import annotations

import math

import pytest
import scipy.special
import torch

from engine.compare.distance import distances, kl_bits


def logprobs(rows: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(4 * torch.randn(rows, size, generator=generator), dim=-1)


@pytest.mark.parametrize("seed", range(5))
def test_divergence_is_that_of_scipy(seed: int) -> None:
    own, other = logprobs(7, 300, seed), logprobs(7, 300, seed + 100)
    p, q = own.double().exp().numpy(), other.double().exp().numpy()
    expected = scipy.special.rel_entr(p, q).sum(-1) / math.log(2)
    torch.testing.assert_close(
        kl_bits(own, other).double(), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )


def test_equal_distributions_have_no_distance() -> None:
    own = logprobs(3, 50, 0)
    assert kl_bits(own, own.clone()).tolist() == [0.0, 0.0, 0.0]


def test_impossible_tokens() -> None:
    never = float("-inf")
    half = math.log(0.5)
    both = torch.tensor([[half, half]])
    one = torch.tensor([[0.0, never]])
    assert kl_bits(one, both).item() == pytest.approx(1.0)
    assert kl_bits(both, one).item() == math.inf
    assert kl_bits(one, one).item() == 0.0


def test_distances_are_those_of_the_written_tokens() -> None:
    own, other = logprobs(2, 9, 1), logprobs(2, 9, 2)
    found = distances([4, 7], own, other)
    assert [one.token for one in found] == [4, 7]
    for row, one in enumerate(found):
        assert one.own == pytest.approx(own[row, one.token].exp().item())
        assert one.other == pytest.approx(other[row, one.token].exp().item())
        assert one.best == int(other[row].argmax())
