"""Shares are disjoint and complete, and sums do not depend on what is summed with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device.ranks import Ranks
from engine.errors import ConfigError
from tests.support.ranks import in_threads


def numbers(own: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [9, 33] of such different sizes that the order of a sum shows."""
    generator = torch.Generator().manual_seed(own)
    x = torch.randn(9, 33, generator=generator)
    return (x * 10 ** (3 * torch.rand(x.shape, generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_sum_adds_in_the_order_of_the_ranks(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> torch.Tensor:
        x = numbers(ranks.own, dtype)
        whole = ranks.sum(x)
        rows = torch.cat([ranks.sum(row) for row in x.split(1)])
        assert torch.equal(whole, rows), "bits depend on the batch"
        assert torch.equal(x, numbers(ranks.own, dtype)), "the argument was changed"
        return whole

    due = numbers(0, dtype).float()
    for own in range(1, count):
        due = due + numbers(own, dtype)
    for found in in_threads(count, tmp_path / "place", work):
        assert torch.equal(found, due.to(dtype))


def test_join_puts_columns_one_after_the_other(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> torch.Tensor:
        return ranks.join(torch.full((2, 3), float(ranks.own))[:, ::2])

    for found in in_threads(3, tmp_path / "place", work):
        assert found.tolist() == [[0, 0, 1, 1, 2, 2]] * 2


def test_numbers_of_all_ranks_are_known_to_each(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> torch.Tensor:
        return torch.tensor(ranks.numbers([ranks.own, 2**40], torch.device("cpu")))

    for found in in_threads(2, tmp_path / "place", work):
        assert found.tolist() == [[0, 2**40], [1, 2**40]]
    assert Ranks().numbers([7], torch.device("cpu")) == [[7]]


def test_units_are_divided_or_kept_by_several_ranks() -> None:
    def shares(count: int, size: int, units: int) -> list[tuple[int, int]]:
        found = [Ranks(own, count).units(size, units) for own in range(count)]
        return [(share.start, share.stop) for share in found]

    assert shares(2, 12, 6) == [(0, 6), (6, 12)]
    assert shares(4, 8, 2) == [(0, 4), (0, 4), (4, 8), (4, 8)]
    with pytest.raises(ConfigError, match="6 heads or other units"):
        shares(4, 12, 6)


def test_rows_of_a_table_are_divided_unevenly() -> None:
    shares = [Ranks(own, 3).rows(10) for own in range(3)]
    assert [(share.start, share.stop) for share in shares] == [(0, 4), (4, 8), (8, 10)]
    with pytest.raises(ConfigError, match="only 4 rows"):
        Ranks(0, 3).rows(4)
