"""A stand-in for CUDA graphs on a CPU: a tape replays captured calls on the same memory.

All other tensors made during captures are poisoned, so that code that relies on them fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.captured_experts import captured_experts
from tests.support.captured_groups import captured_groups

# The results of these ops, or their shapes, depend on tensor values: a device cannot replay them.
HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = torch.ops.aten.index, torch.ops.aten.index_put_


def memory(tensor: torch.Tensor) -> int:
    """Return the identity of the tensor's storage; an opaque oneDNN tensor stands for its own."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def poison(tensor: torch.Tensor) -> None:
    """Fill the tensor with values that make any result computed from it wrong."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        is_float = tensor.is_floating_point()
        tensor.fill_(float("nan") if is_float else torch.iinfo(tensor.dtype).min // 2)


class Tape(TorchDispatchMode):
    """The calls of one capture, and the tensors that were created during it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.outside: dict[int, torch.Tensor] = {}  # tensors that existed before
        self._numbers: dict[int, torch.Tensor] = {}  # Python numbers: constant kernel arguments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.overloadpacket in INDEXING:  # the shape of the result depends on a mask's values
            reads = any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
        else:
            reads = not HOST_READS.isdisjoint(func.tags)
        assert not reads, f"{func} reads a tensor on the host"
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not given[0].dim():
            self._numbers[memory(given[0])] = given[0]
        known = {memory(tensor): tensor for tensor in given}
        for key, tensor in known.items():
            if key not in self.made and key not in self._numbers:
                self.outside[key] = tensor
        fresh: list[torch.Tensor | None] = []
        for tensor in tree_leaves(result):
            new = isinstance(tensor, torch.Tensor) and memory(tensor) not in known
            fresh.append(tensor if new else None)
            if new:
                self.made[memory(tensor)] = tensor
        if func._schema.is_mutable or any(tensor is not None for tensor in fresh):
            self.calls.append((func, args, kwargs, fresh))  # other calls are views
        return result

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            result = func(*args, **kwargs)
            results = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
            for out, found in zip(fresh, results, strict=True):
                if out is not None:
                    out.copy_(found)


class TapeRecorder:
    """A Recorder that poisons the tensors of all captures before each replay."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0
        self._last: Tape | None = None  # the tape replayed last, whose tensors are not poisoned

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        def only_elsewhere(read: Callable[..., Any]) -> Callable[..., Any]:
            def checked(self: torch.Tensor, *args: Any) -> Any:
                if threading.get_ident() == recording:
                    raise AssertionError("a tensor is read on the host")
                return read(self, *args)

            return checked

        recording = threading.get_ident()  # Other threads load adapters meanwhile.
        tolist, numpy = map(only_elsewhere, (torch.Tensor.tolist, torch.Tensor.numpy))
        with (
            mock.patch("engine.attention.torch.backend.query_groups", captured_groups),
            mock.patch("engine.layers.weights.experts.expert_by_expert", captured_experts),
            mock.patch("engine.ops.experts.expert_by_expert", captured_experts),
        ):
            compute()
            with (
                mock.patch.object(torch.Tensor, "tolist", tolist),
                mock.patch.object(torch.Tensor, "numpy", numpy),
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
        """Return tensors that captures use but did not create: a graph keeps their addresses."""
        return {key: value for tape in self.tapes for key, value in tape.outside.items()}
