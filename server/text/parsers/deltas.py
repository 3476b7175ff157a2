"""The parts of an answer, as the parser finds them."""

from __future__ import annotations

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
    deltas with one `index` make a JSON object, unless the answer was cut.
    """

    index: int  # of the call in its choice, from 0
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | ToolCallDelta
