"""Record what a function computes with Numba's kernels, and compute it again without its Python.

It is what a CUDA graph is on a GPU: the same kernels on the same memory. Between kernels a function
may use torch's operations. These are called again, one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.openmp import recorded
from engine.kernels.numba.program import Launch, Program, copy_of
from engine.ops.arena import Arena, aliases

Call = TypeVar("Call", bound=ctypes.Structure)


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
    """A recorded function. Its inputs keep their memory.

    Its result is valid until another function of the same arena is computed.
    """

    def __init__(
        self, result: torch.Tensor, launches: list[Launch], calls: list[TorchCall], kept: list[Any]
    ) -> None:
        """`kept` is the memory besides that of inputs, because kernels know only addresses."""
        self.result = result
        self._kept = kept
        self._program = Program(launches)
        self._arguments = [launch.call for launch in launches]
        self._count = len(launches)
        self._calls = calls

    def arguments_of(self, kind: type[Call]) -> list[Call]:
        """Return the arguments of all kernels that take this kind. They may be changed."""
        return [call for call in self._arguments if isinstance(call, kind)]

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
    """Gives memory of the arena to each tensor that is made."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.launches: list[Launch] = []
        self.calls: list[TorchCall] = []
        self.constants: list[Any] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # outside the arena, by address
        self.can_replay = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing here is compiled; it would import its compiler for a second."""
        return False

    def launch(self, kernel: int, call: ctypes.Structure, constants: Any) -> None:
        self.launches.append(copy_of(kernel, call))
        if constants is not None:
            self.constants.append(constants)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not self.can_replay:
            return result
        schema, results = func._schema, _several(result)
        if schema.is_mutable or not all(isinstance(each, torch.Tensor) for each in results):
            self.can_replay = False
            return result
        is_empty = schema.name.startswith("aten::empty")
        if not is_empty and all(_is_view(each, args) for each in results):
            self._keep(results)
            return result
        own = self._in_arena(results)
        if own is None:
            self.can_replay = False
            return result
        if not is_empty:
            for place, each in zip(own, results, strict=True):
                place.copy_(each)
            arguments, named = aliases(self.arena, args), aliases(self.arena, options)
            results = aliases(self.arena, own)
            self.calls.append(TorchCall(len(self.launches), func, arguments, named, results))
        if isinstance(result, torch.Tensor):
            return own[0]
        return list(own) if isinstance(result, list) else own

    def _in_arena(self, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Return empty tensors like the results, or None if they cannot be in the arena."""
        own = []
        for each in results:
            place = self.arena.take(each) if each.layout == torch.strided else None
            if place is None:
                return None
            own.append(place)
        return tuple(own)

    def _keep(self, views: tuple[torch.Tensor, ...]) -> None:
        """Keep memory outside the arena, as of a number that torch made a tensor."""
        for view in views:
            if view.layout == torch.strided and not self.arena.holds(view):
                storage = view.untyped_storage()
                self.storages[storage.data_ptr()] = storage


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


def record(compute: Callable[[], torch.Tensor], arena: Arena) -> tuple[torch.Tensor, Replay | None]:
    """Compute once; return the result and its replay, or None if it cannot be replayed.

    It cannot if the function writes into its inputs by an operation of torch, or reads a number
    from a tensor; if its tensors do not fit into the arena; or if one of them outlives the
    function, so that a replay would overwrite it.
    """
    before = arena.taken
    recorder = _Recorder(arena)
    with recorder, recorded(recorder.launch):
        result = compute()
    kept = [arena, *recorder.constants, *recorder.storages.values()]
    outlive = len(arena.taken - before) > arena.holds(result)
    if not recorder.can_replay or not recorder.launches or outlive:
        return result, None
    return result, Replay(arena.alias(result), recorder.launches, recorder.calls, kept)
