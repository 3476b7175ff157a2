"""Patches for Triton's interpreter: products, rounding, bounds, speed, and a count of launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter


@cache
def mend() -> None:
    """Patch the interpreter of this process, once."""
    _multiply_like_a_gpu()
    _check_bounds()
    _round_like_a_gpu()
    _replace_the_language_once_a_launch()


def _multiply_like_a_gpu() -> None:
    """Compute tl.dot in double precision, then round.

    The interpreter stores bfloat16 as 16-bit integers and would multiply these. NumPy's matmul also
    sums in an order that depends on a row's position, unlike a GPU. In double precision, rounding
    the product hides that order.
    """

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, sum_: Any, *more: Any) -> Any:
        product = np.matmul(widened(a), widened(b)).astype(sum_.data.dtype)
        return interpreter.TensorHandle(product + sum_.data, sum_.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _round_like_a_gpu() -> None:
    """Round fp32 to the nearest bfloat16, ties to even. The interpreter cuts the lower bits off."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        x = np.ascontiguousarray(src.data, np.float32)
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
        return interpreter.TensorHandle(rounded.reshape(src.data.shape), dst_type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


reached_by_address: list[torch.Tensor] = []  # memory whose address is a number in a tensor


def _check_bounds() -> None:
    """Let an access outside the tensors of its launch fail: it would damage memory."""
    native, launch = interpreter._interpreter, interpreter.GridExecutor.__call__
    launches: list[list[tuple[int, int]]] = []

    def check(pointers: Any, mask: Any, size: int) -> None:
        is_used = np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(pointers))
        addresses = np.asarray(pointers)[is_used]
        inside = np.zeros(len(addresses), dtype=bool)
        for begin, end in launches[-1]:
            inside |= (addresses >= begin) & (addresses <= end - size)
        assert inside.all(), "an access is outside the tensors of the launch"

    class Bounded:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            check(pointers, mask, np.dtype(dtype).itemsize)
            return native.load(pointers, mask, other, dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            check(pointers, mask, value.dtype.itemsize)
            return native.store(pointers, value, mask)

        def atomic_rmw(self, kind: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
            check(pointers, mask, value.dtype.itemsize)
            return native.atomic_rmw(kind, pointers, value, mask, order)

        def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
            check(pointers, True, value.dtype.itemsize)
            return native.atomic_cas(pointers, expected, value, order)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        tensors = [*_tensors([*arguments, *named.values()]), *reached_by_address]
        storages = [each.untyped_storage() for each in tensors]
        launches.append(sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}))
        try:
            return launch(self, *arguments, **named)
        finally:
            launches.pop()

    interpreter._interpreter = Bounded()
    interpreter.GridExecutor.__call__ = call


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, list | tuple):
            yield from _tensors(each)
        elif isinstance(each, torch.Tensor):
            yield each


def _replace_the_language_once_a_launch() -> None:
    """Patch the functions of the Triton language once per launch.

    The interpreter replaces them by functions that compute. It does so again for every call between
    device functions, which takes most of its time.
    """
    replace_language = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    replaced = []

    def restore(scope: Any) -> None:
        replaced.clear()
        scope.restore()

    def replace_once(function: Any) -> Any:
        if replaced:
            return SimpleNamespace(restore=lambda: None)
        replaced.append(function)
        scope = replace_language(both)
        return SimpleNamespace(restore=lambda: restore(scope))

    interpreter._patch_lang = replace_once


def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of each kernel from now on, until the test ends."""
    counted: Counter[str] = Counter()
    launch = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return counted
