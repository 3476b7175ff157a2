"""Run the engine's GPU path without a GPU: fake tensors have a device and a shape, but no memory.

Mixing tensors of two devices raises an error, and so does reading a tensor on the host. Kernels are
not run; only their launch arguments are checked. Results are meaningless: every token is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import signature
from types import SimpleNamespace
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

from engine.kernels.triton.chips import H200

CUDA = torch.device("cuda", 0)
MAX_PROGRAMS = 65535  # limit along the second and third axis of a grid
signature_of = cache(signature)
aten = torch.ops.aten
torch_tensor = torch.tensor


class Event:
    """A CUDA event of a device that has always finished its work."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class EagerRecorder:
    """A Recorder without capture: it calls the function at once and again at each replay."""

    def record(self, compute: Any) -> Any:
        compute()
        return compute


def place_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_filled: Callable[[nn.Module], None],
) -> None:
    """Replace random_weights, which needs a random generator on the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(there, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        on_filled(module)


@contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Patch torch and the engine; yield the number of launches per kernel."""
    launches: Counter[str] = Counter()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        own = {name: value for name, value in options.items() if name in kernel.arg_names}
        for name, value in signature_of(kernel.fn).bind(*args, **own).arguments.items():
            elsewhere = isinstance(value, torch.Tensor) and value.device != CUDA
            assert not elsewhere, f"{kernel.__name__} gets {name} on {value.device}"
        assert all(size > 0 for size in grid), f"{kernel.__name__} of no programs"
        assert all(size <= MAX_PROGRAMS for size in grid[1:]), f"{kernel.__name__}{grid}"
        launches[kernel.__name__] += 1

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    elsewhere = {
        "engine.memory.model_plan.select_device": torch.device,
        "engine.runner.fill_weights.random_weights": place_weights,
        "engine.runner.load.CudaRecorder": EagerRecorder,
        "engine.runner.make_runner.CudaRecorder": EagerRecorder,
        "engine.kernels.triton.attention_shapes.max_shared_mem": lambda device: 227 << 10,
        # There is no memory to give back, and a collection of all of pytest's objects takes 1 s.
        "engine.runner.load.release_memory": lambda: None,
    }
    # Torch caches its list of tensor constructors at first use: fill it before patching.
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
    """torch.unique as if all tokens differed. The real one reads a count from the device."""
    return (tokens, tokens) if return_counts else tokens


# ---- methods of fake tensors that fail in a torch build without CUDA ---------------------------


def tensor(values: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if device != CUDA:
        return torch_tensor(values, dtype=dtype, device=device)
    made = torch_tensor(values, dtype=dtype, device="cpu")
    return torch.empty(made.shape, dtype=made.dtype, device=device)


def to(self: torch.Tensor, what: Any, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(what, torch.dtype):
        return aten._to_copy(self, dtype=what)
    return aten._to_copy(self, device=torch.device(what), non_blocking=non_blocking)


def clone(self: torch.Tensor) -> torch.Tensor:
    return aten.clone(self, memory_format=torch.contiguous_format)


def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return aten.copy_(self, other, non_blocking)


def getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
    there: list[torch.Tensor | None] = []  # one index per dimension of the result so far
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
    "contiguous": lambda self: self if self.is_contiguous() else clone(self),
    "to": to,
    "copy_": copy_,
    "__getitem__": getitem,
    "__setitem__": setitem,
    "tolist": tolist,
    "numpy": numpy,
}
FACTS = SimpleNamespace(
    major=H200.capability[0],
    minor=H200.capability[1],
    multi_processor_count=H200.num_sms,
    L2_cache_size=H200.l2_bytes,
)
DEVICE = {
    "Event": Event,
    "get_device_properties": lambda device: FACTS,
    "is_bf16_supported": lambda **asked: True,
    "mem_get_info": lambda *asked: (70 << 30, 80 << 30),
    "memory_allocated": lambda: 0,
    "max_memory_allocated": lambda: 0,
    "reset_peak_memory_stats": lambda: None,
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
}
