"""A CUDA graph's contract, on a CPU: what is recorded is replayed on the same memory, and nothing
else can be counted on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results, or the shapes of these, depend on what tensors hold: a device cannot replay them.
HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = torch.ops.aten.index, torch.ops.aten.index_put_


def memory(tensor: torch.Tensor) -> int:
    """Whose memory this is; an opaque oneDNN tensor has none to show."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def poison(tensor: torch.Tensor) -> None:
    """What nothing can be computed from unnoticed."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


class Tape(TorchDispatchMode):
    """The calls of one recording, and the tensors that came into being during it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.outside: dict[int, torch.Tensor] = {}  # what was there before
        self._numbers: list[torch.Tensor] = []  # Python's: they go into a kernel's arguments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.overloadpacket in INDEXING:  # a mask would have to be counted
            reads = any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
        else:
            reads = not HOST_READS.isdisjoint(func.tags)
        assert not reads, f"{func} reads a tensor on the host"
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not given[0].dim():
            self._numbers += given
        known, numbers = ({memory(x) for x in tensors} for tensors in (given, self._numbers))
        for tensor in given:
            if memory(tensor) not in self.made.keys() | numbers:
                self.outside[memory(tensor)] = tensor
        fresh: list[torch.Tensor | None] = []
        for tensor in tree_leaves(result):
            new = isinstance(tensor, torch.Tensor) and memory(tensor) not in known
            fresh.append(tensor if new else None)
            if new:
                self.made[memory(tensor)] = tensor
        self.calls.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            for out, result in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                if out is not None:
                    out.copy_(result)


class TapeRecorder:
    """A Recorder whose replays find everything poisoned that any recording has made."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0
        self._last: Tape | None = None  # the one whose memory holds numbers

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        def forbidden(self: torch.Tensor, *args: Any) -> Any:
            raise AssertionError("a tensor is read on the host")

        compute()
        with (
            mock.patch.object(torch.Tensor, "tolist", forbidden),
            mock.patch.object(torch.Tensor, "numpy", forbidden),
            Tape() as tape,
        ):
            compute()
        self.tapes.append(tape)
        self._spoil(tape)

        def replay() -> None:
            self._spoil(self._last)
            tape.replay()
            self._last = tape
            self.replays += 1

        return replay

    def _spoil(self, tape: Tape | None) -> None:
        for tensor in tape.made.values() if tape else ():
            poison(tensor)

    def outside(self) -> dict[int, torch.Tensor]:
        """What the recordings use and have not made: a graph holds its address for ever."""
        return {key: value for tape in self.tapes for key, value in tape.outside.items()}
