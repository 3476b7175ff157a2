"""A pickled tiktoken Encoding, read without unpickling it.

A pickle is a program for a stack machine. The machine here knows the instructions that the pickle
of an Encoding consists of, none of which imports or calls anything: nothing can be executed.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from engine.errors import ConfigError

CLASS = ("tiktoken.core", "Encoding")
VALUES = {
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
    *("BININT", "BININT1", "BININT2"),
}


class Encoding(Struct, frozen=True, forbid_unknown_fields=True):
    """What a tiktoken Encoding is made of."""

    name: str
    pat_str: str  # a regular expression for the pieces, each of which is encoded by itself
    mergeable_ranks: dict[bytes, int]  # token to id; lower ids are merged first
    special_tokens: dict[str, int]


class Instance:
    """Stands on the machine's stack for the Encoding that would be made."""

    state: Any = None


class RefusedError(Exception):
    """The pickle does what no Encoding's pickle does."""


def read_encoding(file: Path) -> Encoding:
    """Raises ConfigError naming the class, the instruction or the field that is not allowed."""
    try:
        state = _state(file.read_bytes())
        if isinstance(state, str):
            raise ConfigError(f"{file} only names {state!r}, an encoding whose tokens it lacks.")
        return msgspec.convert(state, Encoding)
    except RefusedError as error:
        raise ConfigError(
            f"{file} {error}; expected is a pickled {'.'.join(CLASS)} of plain values. "
            "Nothing of it was executed."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no readable pickle of an Encoding: {error}") from error


def _state(data: bytes) -> Any:
    """The values the pickle hands to the one Encoding it makes."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    argument: Any
    for instruction, argument, _ in pickletools.genops(data):
        match instruction.name:
            case "PROTO" | "FRAME":
                pass
            case value if value in VALUES:
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "SETITEMS":
                items = stack[marks[-1] :]
                del stack[marks.pop() :]
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_checked(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_checked(module, name))
            case "NEWOBJ" if stack[-2:] == [CLASS, ()]:
                stack[-2:] = [Instance()]
            case "BUILD" if isinstance(stack[-2], Instance):
                state = stack.pop()
                stack[-1].state = state
            case "STOP":
                return stack.pop().state
            case name:
                raise RefusedError(f"uses the pickle instruction {name}")
    raise ValueError("it ends too early")


def _checked(module: str, name: str) -> tuple[str, str]:
    if (module, name) != CLASS:
        raise RefusedError(f"refers to {module}.{name}")
    return CLASS
