"""A recorded function computes again, over the same memory, what it would compute from scratch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.device.openmp import parallel
from engine.kernels.numba.rowwise import activate, norm
from engine.ops.arena import Arena, Span
from engine.ops.program import Replay
from engine.ops.program import record as record_in
from tests.support.process import ROOT

pytestmark = pytest.mark.skipif(parallel() is None, reason="this torch has no OpenMP threads")
ROWS, WIDTH = 8, 4096


def record(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
    return record_in(compute, Arena())


def stack(x: torch.Tensor) -> torch.Tensor:
    """Twenty kernels. Each reads what all threads wrote in the one before."""
    for _ in range(10):
        doubled, normed = norm(x, x, None, 1e-5)
        x = activate(torch.cat((doubled, normed), dim=1), "silu", gated=True)
    return x


@pytest.mark.parametrize("threads", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.variants(1)
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


def chain(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Norms that read older results again, calls of torch between them, and a constant."""
    first = norm(x, None, None, 1e-5)[1]
    for _ in range(4):
        total, normed = norm(x, first, None, 1e-5)
        halves = activate(torch.cat((total, normed), dim=1), "silu", gated=True).chunk(2, dim=1)
        x = norm(halves[0] + halves[1], None, None, 1e-5)[1].repeat(1, 2) * torch.tensor(1.5)
    return norm(x, table.index_select(0, x.argmax(1)), None, 1e-5)[1]


def test_replay_in_memory_that_is_used_again_equals_the_function() -> None:
    given, table = torch.randn(3, 128), torch.randn(128, 128)
    arena = Arena()
    _, replay = record_in(lambda: chain(given, table), arena)
    assert replay is not None
    spans = [call.data_ptr() for done in replay._calls for call in done.results]
    assert len(set(spans)) < len(spans), "no memory was used again"
    for seed in range(20):
        given.copy_(torch.randn(3, 128, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(replay(), chain(given, table)), seed
        torch.empty(3, 128).fill_(torch.nan)


class CarelessArena(Arena):
    """Takes every tensor but the last two for gone."""

    def take(self, example: torch.Tensor) -> torch.Tensor | None:
        for span, array in list(self._taken.items())[:-2]:
            self._release(span, array)
        return super().take(example)

    def _release(self, span: Span, array: Any) -> None:
        if span in self._taken:
            super()._release(span, array)


def test_memory_that_is_used_too_early_changes_the_result() -> None:
    """So the test above finds an arena that takes a tensor in use for one that is gone."""
    given, table = torch.randn(3, 128), torch.randn(128, 128)
    _, replay = record_in(lambda: chain(given, table), CarelessArena())
    assert replay is not None
    assert not torch.equal(replay(), chain(given, table))


def test_replays_share_an_arena() -> None:
    """Each overwrites the other's tensors, and writes all of its own before it reads them."""
    arena, table = Arena(), torch.randn(128, 128)
    inputs = [torch.randn(rows, 128) for rows in (5, 2, 8)]
    replays = [record_in(lambda x=x: chain(x, table), arena)[1] for x in inputs]
    size = arena.num_bytes
    for seed in range(10):
        for replay, x in zip(replays, inputs, strict=True):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            assert replay is not None
            assert torch.equal(replay(), chain(x, table))
    assert arena.num_bytes == size
    assert not arena.taken


def test_function_whose_tensor_outlives_it_cannot_be_replayed() -> None:
    """A layer may keep a table that it makes when it is first used."""
    x, kept = torch.randn(3, 64), []

    def compute() -> torch.Tensor:
        kept.append(torch.arange(64) * 2)
        return norm(x, None, None, 1e-5)[1]

    arena = Arena()
    assert record_in(compute, arena)[1] is None
    assert len(arena.taken) == 1
    assert kept[0].equal(torch.arange(64) * 2)


def test_function_that_needs_more_than_the_arena_has_is_only_computed() -> None:
    x = torch.randn(64, 4096)

    def compute() -> torch.Tensor:
        return norm(norm(x, None, None, 1e-5)[1] * 2, None, None, 1e-5)[1]

    assert record_in(compute, Arena(4 << 20))[1] is not None
    arena = Arena(2 << 20)
    result, replay = record_in(compute, arena)
    assert replay is None
    assert torch.equal(result, compute())
    assert not arena.num_bytes


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
        "from engine.ops.arena import Arena\n"
        "from engine.ops.program import record\n"
        "record(lambda: torch.ones(2) + 1, Arena())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "False\n", ran.stderr
