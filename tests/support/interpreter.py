"""Patches for Triton's interpreter: products, rounding, bounds, speed, and a count of launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

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
    _make_types_once()


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


class _Shape(NamedTuple):
    """Sizes and constants that the interpreter derives from a shape."""

    sizes: tl.tuple  # of numbers, as types have them
    numel: int
    constants: tl.tuple  # of constexpr, as tensors have them
    numel_constant: tl.constexpr


def _make_types_once() -> None:
    """Keep facts of types and shapes, which the interpreter derives again in each operation.

    That takes most of the time of an operation on a few numbers.
    """
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    # The sums that are computed again in 64 bits are dropped, because `debug` is off.
    assert not builder.options.debug
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
    make_block_type, broadcast = tl.block_type.__init__, semantic.broadcast_impl_value
    are_equal, have_equal_values = tl.dtype.__eq__, tl.tuple.__eq__
    shapes: dict[tuple[int, ...], _Shape] = {}
    shape_of: dict[int, _Shape] = {}  # by the id of `sizes`, which are kept
    scalar = _Shape(tl.tuple([]), 1, tl.tuple([]), tl.constexpr(1))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        found = shapes.get(tuple(shape)) if type(shape) is list else shape_of.get(id(shape))
        if found is None:
            make_block_type(self, element_ty, shape)
            sizes = tuple(self.shape)
            found = shapes.get(sizes)
            if found is None:
                constants = tl.tuple([tl.constexpr(size) for size in sizes])
                found = _Shape(self.shape, self.numel, constants, tl.constexpr(self.numel))
                shapes[sizes] = shape_of[id(self.shape)] = found
        self.element_ty, self.shape, self.numel = element_ty, found.sizes, found.numel

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = shape_of[id(type.shape)] if type.is_block() else scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape.constants, shape.numel_constant

    def broadcast_once(lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        sizes = [each.shape if each.is_block() else None for each in (one, other)]
        return (lhs, rhs) if sizes[0] is sizes[1] else broadcast(lhs, rhs)

    def equal(self: Any, other: Any) -> Any:
        return self is other or are_equal(self, other)

    def equal_values(self: Any, other: Any) -> Any:
        if type(other) is list and self.values == other:
            return tl.constexpr(True)
        return have_equal_values(self, other)

    name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, value: None)
    tl.block_type.name = name
    tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__ = block_type, tensor, equal
    tl.tuple.__eq__ = equal_values
    semantic.broadcast_impl_value = broadcast_once


def _cached_by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of a type that computes once for each type of numbers."""
    known: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        element = dtype.scalar
        if isinstance(element, tl.pointer_type):
            return function(dtype)
        if element.name not in known:
            known[element.name] = function(element)
        return known[element.name]

    return cached


def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of each kernel from now on, until the test ends."""
    counted: Counter[str] = Counter()
    launch = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return counted
