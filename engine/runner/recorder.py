"""Capture device work as a graph that is replayed in one call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch


class Recorder(Protocol):
    """Captures a function over static tensors and returns its replay.

    A replay runs the same kernels on the same memory. So the function must not read a tensor on the
    host or use values of the host, and must write its results into existing tensors.
    """

    def record(self, compute: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """CUDA graphs that share one memory pool.

    Only one graph is replayed at a time, so that a graph can reuse the memory of earlier ones.
    Capture the largest graph first: the others then fit into its memory.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture `compute` and return its replay.

        Raises torch.OutOfMemoryError if there is not enough memory for the step or its graph.
        """
        graph = torch.cuda.CUDAGraph()
        # If the end of a capture fails, torch.cuda.graph leaves its own stream selected. The outer
        # stream context restores the previous one.
        with torch.cuda.stream(torch.cuda.current_stream()), _no_collection(), _out_of_memory():
            # Run once before the capture, so that kernels are compiled and libraries allocate their
            # workspaces. Neither is possible during a capture.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                compute()
        return graph.replay


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection during a capture.

    A collection would free device memory, which makes the capture fail. Garbage is collected before
    each capture. Objects that survive are frozen, so that later collections skip them.
    """
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
    """Raise torch.OutOfMemoryError for every error that means out of memory.

    The driver and Triton raise other types. An error that aborts a capture is followed by a second
    one when the capture ends; the first is then its `__context__`.
    """
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__ or error
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
