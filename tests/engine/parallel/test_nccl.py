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

from engine.device.ranks import TIMEOUT, Ranks
from engine.device.symmetric import SymmetricBuffer
from engine.kernels.triton.chips import Features, force
from engine.parallel.messages import Capture, Compute
from engine.runner import rank_sums
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
        self.messages: list[Compute | Capture] = []

    def compute(self, step: Step, *, has_masks: bool) -> None:
        self.messages.append(Compute(step, has_masks))

    def capture(self) -> None:
        self.messages.append(Capture())

    def wait(self) -> None:
        pass

    def rest(self) -> None:
        pass

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


# ---- sums in one launch --------------------------------------------------------------------------


@pytest.fixture
def one_shot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the chip add small sums in one launch, and note these among the collectives."""

    def buffer(
        name: str, store: Any, own: int, count: int, num_bytes: int, device: torch.device
    ) -> SymmetricBuffer:
        NCCL.calls.append((f"share {name}", (num_bytes,)))
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return SymmetricBuffer(memory, [0] * count, None, None)

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            NCCL.calls.append((name, tuple(x.shape)))
            return launch(x, *args, **options)

        return run

    monkeypatch.setattr(rank_sums, "symmetric_buffer", buffer)
    monkeypatch.setattr(rank_sums, "have_peer_access", lambda gpus: True)
    for name in ("rank_sum", "rank_sum_norm"):
        monkeypatch.setattr(rank_sums, name, noted(name, getattr(rank_sums, name)))
    force(Features(rank_sums=True))
    yield
    force(None)


@pytest.mark.usefixtures("one_shot")
def test_all_ranks_launch_the_same_sums_in_the_same_order(tmp_path: Path) -> None:
    model, config = tiny(tmp_path)
    config |= {"tensor_parallel_size": 2}
    followers = Recorded()
    with fake_cuda() as launches:
        with collected() as due:
            driver = Driver(model, depth=1, connect=connect_in(tmp_path), **config)
            driver.runner.lead(followers)
            while driver.runner.capture_when_idle():
                pass
            run(driver)
        own = launches.copy()
        launches.clear()
        with collected() as found:
            loaded = load_engine(driver.config, rank=1, connect=connect_in(tmp_path))
            followers.passed_to(loaded.runner)
    assert found == due
    assert launches == own
    assert own["_rank_sum_norm_kernel"] > 0


@pytest.mark.usefixtures("one_shot")
def test_decode_step_adds_without_nccl_and_norms_in_the_same_launch(tmp_path: Path) -> None:
    """The token embedding is added alone, and both sums of a layer with the norm behind them."""
    model, config = tiny(tmp_path)
    config |= {"tensor_parallel_size": 2, "enforce_eager": True}
    with fake_cuda() as launches:
        driver = Driver(model, depth=1, connect=connect_in(tmp_path), **config)
        driver.runner.lead(Recorded())
        driver.submit([1, 2, 3], 3)
        driver.turn()
        launches.clear()
        with collected() as calls:
            driver.turn()
    assert calls == [
        ("rank_sum", (1, 64)),
        ("rank_sum_norm", (1, 64)),
        ("rank_sum_norm", (1, 64)),
        ("join", (1, 300)),
    ]
    assert launches["_norm_kernel"] == 1, "of the embedding"


@pytest.mark.usefixtures("one_shot")
def test_sum_above_the_limit_takes_nccl(tmp_path: Path) -> None:
    model, config = tiny(tmp_path)
    config |= {"tensor_parallel_size": 2}
    with fake_cuda():
        driver = Driver(model, depth=1, connect=connect_in(tmp_path), **config)
        ranks = driver.loaded.plan.ranks
        with collected() as calls:
            for rows in (4096, 4097):
                ranks.sum(torch.empty(rows, 64, dtype=torch.bfloat16, device=CUDA))
    assert calls == [("rank_sum", (4096, 64)), ("sum", (4097, 64))]


@pytest.mark.parametrize("problem", ["no peers", "driver"])
@pytest.mark.usefixtures("one_shot")
def test_gpus_that_cannot_share_memory_take_nccl(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> SymmetricBuffer:
        raise RuntimeError("CUDA driver error: operation not permitted")

    if problem == "driver":
        monkeypatch.setattr(rank_sums, "symmetric_buffer", fail)
    else:
        monkeypatch.setattr(rank_sums, "have_peer_access", lambda gpus: False)
    model, config = tiny(tmp_path)
    config |= {"tensor_parallel_size": 2, "enforce_eager": True}
    with fake_cuda():
        driver = Driver(model, depth=1, connect=connect_in(tmp_path), **config)
        driver.runner.lead(Recorded())
        driver.submit([1, 2, 3], 2)
        with collected() as calls:
            driver.run()
    assert {name for name, _ in calls} == {"sum", "join"}
    assert rank_sums.NO_PEERS in caplog.messages


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
