"""The Kullback-Leibler divergence against SciPy, and at its edges."""

from __future__ import annotations

import math
from math import nan
from unittest import mock

import msgspec
import pytest
import scipy.special
import torch

from engine.checkpoint.folder import model_folder
from engine.config import EngineConfig
from engine.offline.compare.candidate import Candidate
from engine.offline.compare.distance import distances, kl_bits
from engine.protocol.compare import Compared, Report
from engine.protocol.generate import SamplingParams


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


def test_distance_that_is_infinite_or_no_number_is_none_on_the_wire() -> None:
    """JSON has neither, so msgspec writes null for both."""
    half, never = math.log(0.5), float("-inf")
    own = torch.tensor([[half, half], [half, half]])
    other = torch.tensor([[0.0, never], [math.nan, math.nan]])
    report = Compared(1, 0, 0, distances([0, 0], own, other))
    assert [one.kl for one in report.tokens] == [None, None]
    received = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert isinstance(received, Compared)
    assert [one.other for one in received.tokens] == [1.0, None]


def test_candidate_whose_logits_are_no_numbers_has_an_empty_answer() -> None:
    config = EngineConfig(model=str(model_folder("demo")), num_gpu_blocks_override=8, threads=1)
    candidate = Candidate(config)
    model = candidate.runner.model
    size = 2048  # of the vocabulary
    with mock.patch.object(model, "logits", lambda hidden: torch.full((len(hidden), size), nan)):
        assert candidate.answers([[1, 2]], SamplingParams(max_tokens=3)) == [([], "error")]
        assert candidate.logprobs([1, 2], []).shape == (0, size)
