"""Recording what the device does, to be replayed in one call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch


class Recorder(Protocol):
    """Turns a function over static tensors into its replay.

    A replay runs the same kernels on the same memory: the function must read no tensor on the host,
    take nothing from it, and leave its results in tensors that were there before.
    """

    def record(self, compute: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """CUDA graphs that share one memory pool: recorded largest first, each takes what the ones
    before it have left there, since only one is replayed at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Raises torch.OutOfMemoryError where there is no memory for the step or its recording."""
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph leaves its own stream chosen where the end of a recording fails.
        with torch.cuda.stream(torch.cuda.current_stream()), _no_collection(), _out_of_memory():
            # Once for real: kernels are compiled and libraries take their workspaces now, of which
            # neither may happen while recording.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                compute()
        return graph.replay


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage found while recording would free device memory, which breaks the recording. What
    lives by now stays, so it is never looked through again: a recording collects each time."""
    gc.collect()
    gc.freeze()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _out_of_memory() -> Iterator[None]:
    """One error for all that says so: the driver's and Triton's are not torch's own, and where it
    breaks a recording off, that fails once more as it ends."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__ or error
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
