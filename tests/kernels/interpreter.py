"""Triton's interpreter as the tests need it: products, and speed."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


@cache
def mend() -> None:
    """Once, for good."""
    _multiply_like_a_gpu()
    _replace_the_language_once_a_launch()


def _multiply_like_a_gpu() -> None:
    """The interpreter holds bfloat16 as 16-bit integers, and would multiply these. And NumPy's
    matmul sums in an order that depends on a row's place among others, which a GPU's does not: in
    double precision that is lost when the product is rounded."""

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, sum_: Any, *more: Any) -> Any:
        product = np.matmul(widened(a), widened(b)).astype(sum_.data.dtype)
        return interpreter.TensorHandle(product + sum_.data, sum_.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _replace_the_language_once_a_launch() -> None:
    """For a launch the language's functions are replaced by ones that compute; the interpreter does
    so again for every call of one device function by another, which takes most of its time."""
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
