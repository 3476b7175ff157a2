"""Sums of several ranks in one launch equal sums in the order of the ranks, bit for bit.

The interpreter runs one program after another. So all ranks send, and then all receive; a GPU does
both in one launch. `tests/engine/parallel/test_device_protocols.py` checks the interleavings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device.ranks import Ranks
from engine.kernels.triton import rank_sum as kernels
from engine.kernels.triton.rank_sum import BLOCK_BYTES, rank_sum, rank_sum_norm
from engine.ops.norm import add_rms_norm
from tests.support.program_order import program_order
from tests.support.rank_sums import LocalBuffers
from tests.support.ranks import in_threads

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
RANKS = pytest.mark.parametrize("ranks", [2, 3, 8])


def part(own: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of such different sizes that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * seed + own)
    x = torch.randn(shape, generator=generator)
    return (x * 10 ** (3 * torch.rand(shape, generator=generator))).to(dtype)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the ranks, as Ranks.sum adds on a CPU."""
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each
    return total.to(parts[0].dtype)


def summed(parts: list[torch.Tensor], buffers: LocalBuffers) -> list[torch.Tensor]:
    """Return what each rank gets."""
    for x, own in zip(parts, buffers.of_ranks, strict=True):
        rank_sum(x, own, receives=False)
    return [rank_sum(x, own, sends=False) for x, own in zip(parts, buffers.of_ranks, strict=True)]


@RANKS
@DTYPES
@pytest.mark.variants(2)
def test_sum_equals_the_sum_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    buffers = LocalBuffers(ranks, BLOCK_BYTES)
    # Sums of different sizes follow each other, and use each slot several times.
    for seed, shape in enumerate([(1, 97), (5, 640), (1, 1), (3, 1024), (2, 97), (4, 800)]):
        parts = [part(own, *shape, dtype=dtype, seed=seed) for own in range(ranks)]
        due = in_order(parts)
        for found in summed(parts, buffers):
            assert torch.equal(found, due)


@DTYPES
def test_sum_has_the_bits_of_gloo(dtype: torch.dtype, tmp_path: Path) -> None:
    parts = [part(own, 9, 33, dtype=dtype) for own in range(3)]

    def work(ranks: Ranks) -> torch.Tensor:
        return ranks.sum(parts[ranks.own])

    for found, due in zip(
        summed(parts, LocalBuffers(3, BLOCK_BYTES)),
        in_threads(3, tmp_path / "place", work),
        strict=True,
    ):
        assert torch.equal(found, due)


def test_bits_of_a_row_do_not_depend_on_the_batch() -> None:
    buffers = LocalBuffers(3, BLOCK_BYTES)
    parts = [part(own, 13, 640, dtype=torch.bfloat16) for own in range(3)]
    whole = summed(parts, buffers)[0]
    for row in range(13):
        alone = summed([x[row : row + 1] for x in parts], buffers)[0]
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("seed", range(4))
def test_sums_in_any_order_of_programs_have_the_same_bits_and_count_each_sum(seed: int) -> None:
    buffers = LocalBuffers(3, BLOCK_BYTES)
    with program_order(seed):
        for turn in range(2):
            parts = [part(own, 7, 1000, dtype=torch.bfloat16, seed=turn) for own in range(3)]
            due = in_order(parts)
            assert all(torch.equal(found, due) for found in summed(parts, buffers))
    blocks = -(-7 * 1000 * 2 // BLOCK_BYTES)
    for own in buffers.of_ranks:
        assert own.numbers.tolist() == [2] * blocks + [0] * (own.programs - blocks)


def test_numbers_that_overflow_go_on() -> None:
    """64 sums a step wrap around in days. A flag is compared for equality alone."""
    buffers = LocalBuffers(2, BLOCK_BYTES)
    for own in buffers.of_ranks:
        own.numbers.fill_(2**31 - 2)
    for turn in range(4):
        parts = [part(own, 1, 64, dtype=torch.float32, seed=turn) for own in range(2)]
        assert torch.equal(summed(parts, buffers)[1], in_order(parts))
    assert buffers.of_ranks[0].numbers[0].item() == -(2**31) + 2


def test_largest_sum_fits_and_a_larger_one_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 8 * BLOCK_BYTES  # the interpreter takes long for as many programs as a GPU has
    monkeypatch.setattr(kernels, "LIMIT", limit)
    buffers = LocalBuffers(2, BLOCK_BYTES)
    parts = [part(own, 1, limit // 4, dtype=torch.float32) for own in range(2)]
    assert torch.equal(summed(parts, buffers)[0], in_order(parts))
    with pytest.raises(AssertionError):
        rank_sum(torch.zeros(limit // 4 + 1), buffers.of_ranks[0])


@pytest.mark.variants(4)
@RANKS
@DTYPES
@pytest.mark.parametrize("offset", [False, True])
def test_sum_residual_and_norm_in_one_launch_equal_three_operations(
    ranks: int, dtype: torch.dtype, offset: bool
) -> None:
    size, eps = 97, 1e-5
    buffers = LocalBuffers(ranks, 1024)
    weight = part(90, size, dtype=dtype)
    for seed, rows in enumerate([1, 5, 2]):
        x = part(91, rows, size, dtype=dtype, seed=seed)
        parts = [part(own, rows, size, dtype=dtype, seed=seed) for own in range(ranks)]
        due = add_rms_norm(x, in_order(parts), weight, eps, offset=offset, kernels="triton")
        for own in buffers.of_ranks:
            rank_sum_norm(x, parts[own.own], weight, eps, own, offset=offset, receives=False)
        for own in buffers.of_ranks:
            found = rank_sum_norm(x, parts[own.own], weight, eps, own, offset=offset, sends=False)
            assert torch.equal(found[0], due[0])
            assert torch.equal(found[1], due[1])


def test_one_slot_would_be_overwritten_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may send its next part while another has not read the last one."""

    def second_of(slots: int) -> bool:
        monkeypatch.setattr(kernels, "SLOTS", slots)
        buffers = LocalBuffers(2, BLOCK_BYTES)
        fast, slow = buffers.of_ranks
        first = [part(own, 1, 64, dtype=torch.float32, seed=1) for own in range(2)]
        then = part(0, 1, 64, dtype=torch.float32, seed=2)
        for x, own in zip(first, buffers.of_ranks, strict=True):
            rank_sum(x, own, receives=False)
        rank_sum(first[0], fast, sends=False)
        rank_sum(then, fast, receives=False)
        data = buffers.memory[1].view(torch.float32)
        at = (1 % slots) * 2 * slow.programs * BLOCK_BYTES // 4
        return torch.equal(data[at : at + 64], first[0][0])

    assert second_of(2)
    assert not second_of(1)
