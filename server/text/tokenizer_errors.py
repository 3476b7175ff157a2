"""Failures of the tokenizers library as errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TokenizerError(Exception):
    """The tokenizers library failed on a text: a fault of the checkpoint or of the library."""


def as_tokenizer_error(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise TokenizerError where the library panics or raises a plain Exception.

    A Rust panic is no Exception in Python. TypeError and ValueError, which tell of the text, pass.
    """

    @functools.wraps(method)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"The tokenizers library failed: {error}") from None

    return guarded
