"""Record what a function computes with Numba's kernels, and compute it again without its Python.

It is what a CUDA graph is on a GPU: the same kernels on the same memory. Between kernels a function
may use torch's operations. These are called again, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.openmp import recorded
from engine.kernels.numba.program import Launch, Program, copy_of


@dataclass(frozen=True, slots=True)
class TorchCall:
    """An operation of torch, and the tensor that keeps its result."""

    launches: int  # number of kernels before it
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: torch.Tensor

    def __call__(self) -> None:
        self.result.copy_(self.function(*self.arguments, **self.options))


class Replay:
    """A recorded function. Its inputs and its result keep their memory."""

    def __init__(
        self, result: torch.Tensor, launches: list[Launch], calls: list[TorchCall], kept: list[Any]
    ) -> None:
        self.result = result
        self._kept = kept  # the kernels know only addresses
        self._program = Program(launches)
        self._count = len(launches)
        self._calls = calls

    def __call__(self) -> torch.Tensor:
        """Compute the result from what the inputs hold now."""
        done = 0
        for call in self._calls:
            if call.launches > done:
                self._program.run(done, call.launches)
                done = call.launches
            call()
        if self._count > done:
            self._program.run(done, self._count)
        return self.result


class _Recorder(TorchDispatchMode):
    """Keeps the tensors that are made, so that none takes the memory of another."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.calls: list[TorchCall] = []
        self.kept: list[Any] = []
        self.can_replay = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing here is compiled; it would import its compiler for a second."""
        return False

    def launch(self, kernel: int, call: Any) -> None:
        self.launches.append(copy_of(kernel, call))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        self.kept.append(result)
        schema = func._schema
        if schema.is_mutable or not isinstance(result, torch.Tensor):
            self.can_replay = False
        elif not _is_view(result, args) and not schema.name.startswith("aten::empty"):
            self.calls.append(TorchCall(len(self.launches), func, args, options, result))
        return result


def _is_view(result: torch.Tensor, arguments: tuple[Any, ...]) -> bool:
    """Whether the result is in the memory of an argument. A schema cannot say so for reshape."""
    place = result.untyped_storage().data_ptr()
    plain = [  # without weights in oneDNN's layout, which have no storage
        each
        for each in arguments
        if isinstance(each, torch.Tensor) and each.layout == torch.strided
    ]
    return any(each.untyped_storage().data_ptr() == place for each in plain)


def record(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
    """Compute once; return the result and its replay, or None if it cannot be replayed.

    It cannot if the function writes into its inputs by an operation of torch, or reads a number
    from a tensor.
    """
    recorder = _Recorder()
    with recorder, recorded(recorder.launch):
        result = compute()
    if not recorder.can_replay or not recorder.launches:
        return result, None
    return result, Replay(result, recorder.launches, recorder.calls, recorder.kept)
