"""Ranks on GPUs, with a stand-in for NCCL and tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from engine.device.board import Board
from engine.device.facts import device_of_rank
from engine.device.ranks import TIMEOUT, Ranks
from engine.errors import ConfigError
from engine.parallel.messages import Capture, Compute
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import Step
from tests.support.driver import Driver, tiny_llama
from tests.support.fake_cuda import CUDA, fake_cuda

Call = tuple[str, tuple[int, ...]]  # a collective, and the shape of a rank's tensor


class NCCL:
    """A process group that notes collectives. Like torch's, it returns no work for those that run
    in the current stream."""

    calls: list[Call]
    timeout: Any

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        type(self).timeout = options._timeout

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        [tensor] = tensors
        assert not options.asyncOp, "runs in a stream of its own"
        self.calls.append(("sum", tuple(tensor.shape)))

    def allgather(self, found: Any, given: list[torch.Tensor], options: Any) -> None:
        [tensor] = given
        assert not options.asyncOp, "runs in a stream of its own"
        self.calls.append(("join", tuple(tensor.shape)))


def numbers(ranks: Ranks, own: Any, device: torch.device) -> list[list[int]]:
    """Ranks.numbers, as if all ranks had the same. Fake tensors hold none."""
    NCCL.calls.append(("numbers", (len(own),)))
    return [list(own)] * ranks.count


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    NCCL.calls = []
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(Ranks, "numbers", numbers)
    monkeypatch.setattr("engine.memory.model_plan.device_of_rank", lambda device, ranks: device)


def test_ranks_connect_at_once_and_wait_as_long_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([(70 << 30, 80 << 30), (69 << 30, 80 << 30)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(free))
    ranks = Ranks(1, 2)
    ranks.connect(CUDA, str(tmp_path / "place"))
    assert ranks.connection_bytes == 1 << 30
    assert NCCL.calls == [("numbers", (1,))]
    assert NCCL.timeout == TIMEOUT


class Recorded:
    """Followers that keep the messages, and pass them to a rank later."""

    def __init__(self) -> None:
        self.board = Board()
        self.messages: list[Compute | Capture] = []

    def compute(self, step: Step, *, has_masks: bool) -> None:
        self.messages.append(Compute(step, has_masks))

    def capture(self) -> None:
        self.messages.append(Capture())

    def passed_to(self, runner: ModelRunner) -> None:
        for message in self.messages:
            if isinstance(message, Compute):
                runner.launch(message.step)
            else:
                runner.capture_when_idle()


def tiny(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a model of one layer, and the settings that it is served with."""
    config: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
    config |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 64}
    return tiny_llama(folder / "model", hidden_size=64, num_hidden_layers=1), config


def connect_in(folder: Path) -> Callable[[Ranks, torch.device], None]:
    return lambda ranks, device: ranks.connect(device, str(folder / "place"))


@contextmanager
def collected() -> Iterator[list[Call]]:
    """Yield the collectives of the block."""
    NCCL.calls = []
    yield NCCL.calls


def run(driver: Driver) -> None:
    """Compute chunks, decodes and both together, in graphs and kernel by kernel."""
    driver.submit([1, 2, 3] * 7, 2, prompt_logprobs=1)
    driver.submit([1, 2, 3], 3)
    driver.submit([4], 3, temperature=1.0, seed=3)
    driver.run()


def test_all_ranks_call_the_same_collectives_in_the_same_order(tmp_path: Path) -> None:
    """Also while memory is measured and while graphs are captured, at start and when idle."""
    model, config = tiny(tmp_path)
    config |= {"tensor_parallel_size": 2}
    followers = Recorded()
    with fake_cuda():
        with collected() as due:
            driver = Driver(model, depth=1, connect=connect_in(tmp_path), **config)
            driver.runner.lead(followers)
            while driver.runner.capture_when_idle():
                pass
            captured = len(due)
            run(driver)
        with collected() as found:
            loaded = load_engine(driver.config, rank=1, connect=connect_in(tmp_path))
            followers.passed_to(loaded.runner)
    assert found == due
    assert {name for name, _ in due[captured:]} == {"sum", "join"}


def test_rank_without_memory_for_a_graph_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it would go on with the graphs it has, but other ranks have one more or one less."""
    model, config = tiny(tmp_path)

    def full() -> bool:
        raise torch.OutOfMemoryError("tried to allocate 2.00 MiB")

    with fake_cuda():
        ranked = config | {"tensor_parallel_size": 2}
        several = Driver(model, depth=1, connect=connect_in(tmp_path), **ranked).runner
        alone = Driver(model, depth=1, **config).runner
        for runner in (several, alone):
            assert runner.graphs is not None
            monkeypatch.setattr(runner.graphs, "capture_next", full)
        assert not alone.capture_when_idle()
        with pytest.raises(torch.OutOfMemoryError):
            several.capture_when_idle()


def test_rank_chooses_its_gpu_before_anything_else_uses_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    assert device_of_rank(cuda, Ranks(1, 2)) == torch.device("cuda", 1)
    assert chosen == [1]
    assert device_of_rank(cuda, Ranks()) == cuda
    with pytest.raises(ConfigError, match="needs as many GPUs; torch finds 2"):
        device_of_rank(cuda, Ranks(2, 3))
    assert chosen == [1]
