"""CudaRecorder after a capture that fails, tested without a GPU on a double of torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.runner.recorder import CudaRecorder

NO_MEMORY = "CUDA error: out of memory"
BROKEN_OFF = "CUDA error: operation failed due to a previous error during capture"


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Device:
    """The parts of torch.cuda that CudaRecorder uses. A capture ends with the error `fails`."""

    def __init__(self) -> None:
        self.current = self.default = Stream()
        self.fails = ""

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:  # like torch.cuda.graph.__exit__
            if self.fails:
                raise torch.AcceleratorError(self.fails)
            self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", torch.nn.Identity)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "graph", device.graph)
    return device


class Compute:
    """Raises `error` at call number `call`: the first is the warm-up, the second the capture."""

    def __init__(self, call: int = 0, error: Exception | None = None) -> None:
        self.left, self.error = call, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0 and self.error:
            raise self.error


@pytest.mark.parametrize(
    ("fails", "compute"),
    [
        (NO_MEMORY, Compute()),  # the driver has no memory for the graph itself
        (BROKEN_OFF, Compute(2, torch.OutOfMemoryError("Tried to allocate 2 MiB."))),
        ("", Compute(2, torch.OutOfMemoryError("Tried to allocate 2 MiB."))),
        ("", Compute(1, RuntimeError("Triton Error [CUDA]: out of memory"))),
    ],
    ids=["driver", "broken-off", "torch", "triton"],
)
def test_capture_out_of_memory_raises_one_error_and_restores_stream(
    device: Device, fails: str, compute: Compute
) -> None:
    """The engine then continues without that graph, on its previous stream."""
    recorder, device.fails = CudaRecorder(), fails
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(compute)
    assert device.current is device.default


def test_capture_other_error_is_raised_unchanged(device: Device) -> None:
    recorder, device.fails = CudaRecorder(), "CUDA error: an illegal memory access was encountered"
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        recorder.record(Compute())
