"""The engine as on a GPU, where there is none: tensors with a device and a shape, and no memory.

Whatever mixes tensors of two devices raises, and so does reading one on the host; a kernel is only
asked whether a GPU could launch it. What is computed means nothing: every token is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

CUDA = torch.device("cuda", 0)
MOST_PROGRAMS = 65535  # along the second and third axis of a grid
aten = torch.ops.aten
torch_tensor = torch.tensor


class Event:
    """Of a device that is never behind."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class EagerRecorder:
    """Computes what it is given instead of recording it, and again at each replay."""

    def record(self, compute: Any) -> Any:
        compute()
        return compute


def place_weights(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Stands in for random_weights, which needs a generator on the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty_like(buffer, device=device)


@contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Yields how often each kernel was launched."""
    launches: Counter[str] = Counter()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        own = {name: value for name, value in options.items() if name in kernel.arg_names}
        for name, value in signature(kernel.fn).bind(*args, **own).arguments.items():
            elsewhere = isinstance(value, torch.Tensor) and value.device != CUDA
            assert not elsewhere, f"{kernel.__name__} gets {name} on {value.device}"
        assert all(size > 0 for size in grid), f"{kernel.__name__} of no programs"
        assert all(size <= MOST_PROGRAMS for size in grid[1:]), f"{kernel.__name__}{grid}"
        launches[kernel.__name__] += 1

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    elsewhere = {
        "engine.runner.blueprint.select_device": torch.device,
        "engine.runner.model_runner.random_weights": place_weights,
        "engine.runner.model_runner.CudaRecorder": EagerRecorder,
        "engine.kernels.attention_tiles.max_shared_mem": lambda device: 227 << 10,
    }
    # Torch keeps the list of what `with torch.device(...)` is about from its first use on.
    _device_constructors()
    with ExitStack() as stack:
        for path, value in elsewhere.items():
            stack.enter_context(mock.patch(path, value))
        for name, value in DEVICE.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in TENSOR.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, value, create=True))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "pin_memory", lambda x: fake.from_tensor(x))
        )
        stack.enter_context(mock.patch.object(torch, "unique", unique))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", launch))
        stack.enter_context(fake)
        yield launches


def unique(tokens: torch.Tensor, return_counts: bool = False) -> Any:
    """As if all differed: how many do is on the device, and penalties wait for it."""
    return (tokens, tokens) if return_counts else tokens


# ---- what a torch without CUDA keeps even a fake tensor from -----------------------------------


def tensor(values: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if device != CUDA:
        return torch_tensor(values, dtype=dtype, device=device)
    made = torch_tensor(values, dtype=dtype, device="cpu")
    return torch.empty(made.shape, dtype=made.dtype, device=device)


def to(self: torch.Tensor, what: Any, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(what, torch.dtype):
        return aten._to_copy(self, dtype=what)
    return aten._to_copy(self, device=torch.device(what), non_blocking=non_blocking)


def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return aten.copy_(self, other, non_blocking)


def getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
    there: list[torch.Tensor | None] = []  # by the result's dimensions so far
    index = index if isinstance(index, tuple) else (index,)
    if any(one is ... for one in index):
        at = next(place for place, one in enumerate(index) if one is ...)
        named = sum(one is not None for one in index) - 1
        index = (*index[:at], *[slice(None)] * (self.dim() - named), *index[at + 1 :])
    for one in index:
        match one:
            case None:
                self = aten.unsqueeze(self, len(there))
                there.append(None)
            case int():
                self = aten.select(self, len(there), one)
            case slice():
                self = aten.slice(self, len(there), one.start, one.stop, one.step or 1)
                there.append(None)
            case _:
                there.append(tensor(one, device=self.device) if isinstance(one, list) else one)
    return aten.index(self, there) if any(x is not None for x in there) else self


def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
    there = getitem(self, index)
    if isinstance(value, torch.Tensor):
        copy_(there, value)


def numpy(self: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.zeros(self.shape, dtype=np.float32)


def tolist(self: torch.Tensor) -> Any:
    return np.zeros(self.shape, dtype=np.int64).tolist()


TENSOR = {
    "__invert__": lambda self: aten.bitwise_not(self),
    "contiguous": lambda self: aten.clone(self, memory_format=torch.contiguous_format),
    "to": to,
    "copy_": copy_,
    "__getitem__": getitem,
    "__setitem__": setitem,
    "tolist": tolist,
    "numpy": numpy,
}
DEVICE = {
    "Event": Event,
    "is_bf16_supported": lambda **asked: True,
    "mem_get_info": lambda *asked: (70 << 30, 80 << 30),
    "memory_allocated": lambda: 0,
    "max_memory_allocated": lambda: 0,
    "reset_peak_memory_stats": lambda: None,
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
}
