"""Norms that ranks share equal those of one rank, with heads that several ranks keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.device.ranks import Ranks
from engine.layers.norm import GroupedRMSNorm, SharedRMSNorm, norm_together
from tests.support.ranks import in_threads

HEADS, KV_HEADS, DIM = 8, 2, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4])  # two of four ranks keep the same KV head
def test_ranks_norm_their_heads_by_the_root_mean_square_of_all(
    count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [heads * DIM for heads in (HEADS, KV_HEADS)]
    # Heads of very different sizes: the norm of one is not that of all.
    q, k = (
        (torch.randn(9, n, generator=generator) * torch.arange(1, n + 1)).to(dtype) for n in sizes
    )
    weights = [torch.randn(n, generator=generator).to(dtype) for n in sizes]

    def norms(ranks: Ranks) -> list[SharedRMSNorm]:
        made = [SharedRMSNorm(heads, DIM, 1e-5) for heads in (HEADS, KV_HEADS)]
        for norm, weight in zip(made, weights, strict=True):
            rows = slice(None)
            if ranks.count > 1:
                norm.divide(ranks)
                assert norm.tensors.shard is not None
                rows = norm.tensors.shard.rows[""]
            norm.weight = nn.Parameter(weight[rows], requires_grad=False)
        return made

    def work(ranks: Ranks) -> torch.Tensor:
        own = [ranks.units(n, heads) for n, heads in zip(sizes, (HEADS, KV_HEADS), strict=True)]
        parts = [q[:, own[0]], k[:, own[1]]]
        found = norm_together(norms(ranks), parts)
        alone = norm_together(norms(ranks), [part[3:4] for part in parts])
        for whole, row in zip(found, alone, strict=True):
            assert torch.equal(whole[3:4], row), "bits depend on the batch"
        return torch.cat(found, dim=1)

    due_q, due_k = norm_together(norms(Ranks()), (q, k))
    for own, found in enumerate(in_threads(count, tmp_path / "place", work)):
        ranks = Ranks(own, count)
        due = torch.cat(
            (due_q[:, ranks.units(sizes[0], HEADS)], due_k[:, ranks.units(sizes[1], KV_HEADS)]), 1
        )
        torch.testing.assert_close(found, due)


def gated_norm(ranks: Ranks, groups: int, weight: torch.Tensor) -> GroupedRMSNorm:
    norm = GroupedRMSNorm(HEADS * DIM, 1e-5, groups=groups, units=HEADS)
    norm.divide(ranks)
    norm.weight = nn.Parameter(weight[ranks.units(HEADS * DIM, HEADS)], requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8])  # all ranks share one, two do, or none
def test_ranks_gate_and_norm_in_groups_that_they_share(
    groups: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    y, z = (torch.randn(9, HEADS * DIM, generator=generator).to(dtype) for _ in range(2))
    y = y * torch.arange(1, HEADS * DIM + 1)  # groups of very different sizes
    y = y.to(dtype)
    weight = torch.randn(HEADS * DIM, generator=generator).to(dtype)

    gated = (y.double() * torch.nn.functional.silu(z.double())).unflatten(1, (groups, -1))
    due = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    due = (due.flatten(1) * weight.double()).to(dtype)
    torch.testing.assert_close(gated_norm(Ranks(), groups, weight)(y, z), due)

    def work(ranks: Ranks) -> torch.Tensor:
        own = ranks.units(HEADS * DIM, HEADS)
        norm, parts = gated_norm(ranks, groups, weight), (y[:, own], z[:, own])
        found = norm(*parts)
        assert torch.equal(found[3:4], norm(*(part[3:4] for part in parts)))
        return found

    for own, found in enumerate(in_threads(4, tmp_path / "place", work)):
        torch.testing.assert_close(found, due[:, Ranks(own, 4).units(HEADS * DIM, HEADS)])
