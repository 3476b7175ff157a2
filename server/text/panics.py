"""Panics of the tokenizers library as errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TokenizerError(Exception):
    """The tokenizers library failed on a text: a fault of the checkpoint or of the library."""


def without_panics(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise TokenizerError where the library panics: a Rust panic is no Exception in Python."""

    @functools.wraps(method)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"The tokenizers library failed: {error}") from None

    return guarded
