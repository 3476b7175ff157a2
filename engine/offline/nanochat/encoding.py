"""Read a pickled tiktoken Encoding without unpickling it.

A pickle is a program for a stack machine. The machine here knows only the instructions in the
pickle of an Encoding. None of them imports or calls anything, so nothing can be executed.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from engine.errors import ConfigError, one_line

CLASS = ("tiktoken.core", "Encoding")
VALUES = {
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
    *("BININT", "BININT1", "BININT2"),
}


class Encoding(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a tiktoken Encoding."""

    name: str
    pat_str: str  # regular expression that splits a text into separately encoded pieces
    mergeable_ranks: dict[bytes, int]  # token to id; lower ids are merged first
    special_tokens: dict[str, int]


class Instance:
    """Placeholder on the machine's stack for the Encoding that unpickling would create."""

    state: Any = None


class RefusedError(Exception):
    """The pickle contains something that the pickle of an Encoding never contains."""


def read_encoding(file: Path) -> Encoding:
    """Return the Encoding in a pickle file.

    Raises ConfigError naming the class, the instruction or the field that is not allowed.
    """
    try:
        state = _state(file.read_bytes())
        if isinstance(state, str):
            raise ConfigError(f"{file} only names the encoding {state!r} and lacks its tokens.")
        return msgspec.convert(state, Encoding)
    except RefusedError as error:
        raise ConfigError(
            f"{file} {error}; expected a pickled {'.'.join(CLASS)} of plain values. "
            "Nothing in the file was executed."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a readable pickle of an Encoding: {one_line(error)}"
        ) from error


def _state(data: bytes) -> Any:
    """Return the values with which the pickle creates its one Encoding."""
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
    raise ValueError("the pickle ends too early")


def _checked(module: str, name: str) -> tuple[str, str]:
    if (module, name) != CLASS:
        raise RefusedError(f"refers to {module}.{name}")
    return CLASS
