"""One of several processes on GPUs: `python -m tests.gpu.rank_worker RANK COUNT PLACE`.

It adds tensors in one launch, in a graph and outside, and compares them with the sum in the order
of the ranks. Then it prints the seconds of a sum in a graph, in one launch and by NCCL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from engine.device.ranks import Ranks
from engine.device.topology import device_of_rank
from engine.kernels.triton.rank_sum import BLOCK_BYTES
from engine.runner.rank_sums import start_one_shot_sums
from engine.runner.recorder import CudaRecorder

HIDDEN = 4096
SUMS = 64  # of a graph, as in a step of a model with 32 layers


def in_order(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    """Return the sum in the order of the ranks."""
    first, *others = ranks.join(x[..., None]).unbind(-1)
    total = first.float()
    for other in others:
        total = total + other.float()
    return total.to(x.dtype)


def check(ranks: Ranks, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(ranks.own)
    for turn in range(20):
        for rows in (1, 3, 16, 64):
            x = torch.randn(rows, HIDDEN, generator=generator, device=device) * 10**turn
            for dtype in (torch.bfloat16, torch.float32):
                part = x[: 32 if dtype == torch.float32 else rows].to(dtype)
                assert torch.equal(ranks.sum(part), in_order(ranks, part)), (turn, rows, dtype)


def check_graph(ranks: Ranks, device: torch.device) -> None:
    x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
    out = torch.zeros_like(x)

    def add() -> None:
        out.copy_(ranks.sum(ranks.sum(x)))

    replay = CudaRecorder().record(add)
    for turn in range(100):
        x.fill_(turn % 7 + ranks.own)
        replay()
        due = ranks.count * sum(turn % 7 + own for own in range(ranks.count))
        assert out.eq(due).all(), turn


def seconds(ranks: Ranks, device: torch.device, total: Callable[[torch.Tensor], object]) -> float:
    """Return the median seconds of a sum of one row in a graph of SUMS."""
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)

    def add() -> None:
        for _ in range(SUMS):
            total(x)

    replay = CudaRecorder().record(add)
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / SUMS)
    return sorted(times)[len(times) // 2]


def main(own: int, count: int, place: str) -> None:
    ranks = Ranks(own, count)
    device = device_of_rank(torch.device("cuda"), ranks)
    ranks.connect(device, place)
    by_nccl = seconds(ranks, device, ranks.sum)
    assert start_one_shot_sums(ranks, device, [BLOCK_BYTES]), "the GPUs cannot share memory"
    check(ranks, device)
    check_graph(ranks, device)
    at_once = seconds(ranks, device, ranks.sum)
    if own == 0:
        print(f"{count} GPUs, 1 x {HIDDEN}: {at_once * 1e6:.1f} us, NCCL {by_nccl * 1e6:.1f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
