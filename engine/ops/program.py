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
    """An operation of torch, and the tensors that keep its results."""

    launches: int  # number of kernels before it
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        found = self.function(*self.arguments, **self.options)
        for own, new in zip(self.results, _several(found), strict=True):
            own.copy_(new)


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
        schema, results = func._schema, _several(result)
        is_empty = schema.name.startswith("aten::empty")
        if schema.is_mutable or not all(isinstance(each, torch.Tensor) for each in results):
            self.can_replay = False
        elif not is_empty and not all(_is_view(each, args) for each in results):
            self.calls.append(TorchCall(len(self.launches), func, args, options, results))
        return result


def _several(result: Any) -> tuple[Any, ...]:
    """Return the results of an operation that has one or several."""
    return tuple(result) if isinstance(result, list | tuple) else (result,)


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
