"""A recorded function computes again, over the same memory, what it would compute from scratch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from engine.device.openmp import parallel
from engine.kernels.numba.rowwise import activate, norm
from engine.ops.program import record
from tests.support.process import ROOT

pytestmark = pytest.mark.skipif(parallel() is None, reason="this torch has no OpenMP threads")
ROWS, WIDTH = 8, 4096


def stack(x: torch.Tensor) -> torch.Tensor:
    """Twenty kernels. Each reads what all threads wrote in the one before."""
    for _ in range(10):
        doubled, normed = norm(x, x, None, 1e-5)
        x = activate(torch.cat((doubled, normed), dim=1), "silu", gated=True)
    return x


@pytest.mark.parametrize("threads", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_replay_equals_the_function_on_new_inputs(threads: int) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = torch.randn(ROWS, WIDTH)
        result, replay = record(lambda: stack(given))
        assert torch.equal(result, stack(given))
        assert replay is not None
        for seed in range(200):
            given.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))
            assert torch.equal(replay(), stack(given)), seed
    finally:
        torch.set_num_threads(usual)


def test_replay_calls_torch_before_between_and_after_kernels() -> None:
    ids, table = torch.tensor([1, 2]), torch.randn(4, 64)

    def compute() -> torch.Tensor:
        x = table.index_select(0, ids)
        x = norm(x, None, None, 1e-5)[1].exp()
        return norm(x, None, None, 1e-5)[1] + 1

    _, replay = record(compute)
    assert replay is not None
    ids.copy_(torch.tensor([3, 0]))
    assert torch.equal(replay(), compute())
    ids.copy_(torch.tensor([0, 0]))
    assert torch.equal(replay(), compute())


def test_replay_computes_all_results_of_an_operation() -> None:
    x = torch.randn(3, 64)

    def compute() -> torch.Tensor:
        values, places = norm(x, None, None, 1e-5)[1].sort()
        return norm(values + places, None, None, 1e-5)[1]

    _, replay = record(compute)
    assert replay is not None
    x.copy_(torch.randn(3, 64))
    assert torch.equal(replay(), compute())


@torch.inference_mode()
def test_replay_copies_again_what_reshape_had_to_copy() -> None:
    """In inference mode torch shows reshape whole, and a copy looks like a view."""
    x = torch.randn(3, 4, 64)

    def compute() -> torch.Tensor:
        return norm(x[:, 1:3].reshape(-1, 64), None, None, 1e-5)[1]

    _, replay = record(compute)
    assert replay is not None
    x.copy_(torch.randn(3, 4, 64))
    assert torch.equal(replay(), compute())


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.sum().item()],
    ids=["writes", "reads"],
)
def test_function_that_cannot_be_replayed_is_only_computed(
    change: Callable[[torch.Tensor], object],
) -> None:
    x = torch.ones(2, 64)

    def compute() -> torch.Tensor:
        change(x)
        return norm(x, None, None, 1e-5)[1]

    result, replay = record(compute)
    assert replay is None
    assert result.shape == (2, 64)
    assert record(lambda: torch.ones(3) + 1)[1] is None, "no kernel"


def test_kernels_of_a_failed_function_are_not_recorded_later() -> None:
    x = torch.ones(2, 64)

    def fail() -> torch.Tensor:
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        record(fail)
    _, replay = record(lambda: norm(x, None, None, 1e-5)[1])
    assert replay is not None
    assert replay._count == 1


def test_recording_does_not_import_the_compiler_of_torch() -> None:
    """It would make every start a second longer, and needs a folder to write to."""
    code = (
        "import sys, torch\n"
        "from engine.ops.program import record\n"
        "record(lambda: torch.ones(2) + 1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "False\n", ran.stderr
