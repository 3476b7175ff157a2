"""The parts of an answer, as the parser finds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# The fate of a tool call. "malformed" is a text that looked like one.
CallOutcome = Literal["valid", "unknown_tool", "invalid_arguments", "malformed"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next text of what the model thinks before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a tool call.

    `id` and `name` are set in the first delta of each call, and only there. The `arguments` of all
    deltas with one `index` make a JSON object, unless the answer was cut. Of a custom tool's call,
    they make its input, which is any text.
    """

    index: int  # of the call in its choice, from 0
    id: str | None
    name: str | None
    arguments: str
    is_custom: bool = False


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Return events in which neighbours of one kind, and of one call, are one."""
    if len(deltas) < 2:
        return [*deltas]
    return [_joint(list(group)) for _, group in itertools.groupby(deltas, _kind)]


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    """Return what neighbouring events that belong together have in common."""
    return type(delta), delta.index if isinstance(delta, ToolCallDelta) else 0


def _joint(deltas: Sequence[Delta]) -> Delta:
    """Return events of one kind as one."""
    first = deltas[0]
    if isinstance(first, ToolCallDelta):
        arguments = [delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)]
        return dataclasses.replace(first, arguments="".join(arguments))
    texts = [delta.text for delta in deltas if not isinstance(delta, ToolCallDelta)]
    return type(first)("".join(texts))
