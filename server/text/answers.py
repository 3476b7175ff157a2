"""How a model writes its answers, as the spine sees it: facts, and functions that read answers.

`server.text.parsers.answers` makes them when the server starts. Nothing here knows a format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from server.text.deltas import CallOutcome, Delta
from server.text.marks import Marks
from server.text.tools import ToolUse

# Of a format: a flag, the checkpoint's response template, the table of formats, or what the chat
# template renders.
Source = Literal["flag", "response_template", "table", "template", "none"]
JsonOptions = Mapping[str, Any]  # of llguidance, for the JSON in a grammar


class Parser(Protocol):
    """The last stage of a choice: splits its text into content, reasoning and calls."""

    def push(self, text: str) -> None:
        """Read the next text, in which some tokens are marks."""

    def flush(self, *, is_cut: bool) -> None:
        """End the text. With `is_cut` the model had not finished it."""

    def take(self) -> list[Delta]:
        """Return the parts since the last call."""

    @property
    def is_reasoning(self) -> bool: ...

    @property
    def is_in_call(self) -> bool: ...

    @property
    def has_calls(self) -> bool: ...

    @property
    def is_full(self) -> bool:
        """Whether the answer has all the calls that it may have."""

    @property
    def outcomes(self) -> Sequence[CallOutcome]:
        """The fate of each call, and of each text that looked like one."""


@dataclass(frozen=True)
class Parsing:
    """How the answers to one prompt are parsed. Each choice makes a parser of its own."""

    marks: Marks  # of the tokens that are more than text to the parser
    new_parser: Callable[[bool], Parser]  # with True, special tokens are shown in the text


@dataclass(frozen=True)
class Answers:
    """How a model writes its answers. Each function gets the text of the prompt.

    The grammars are in llguidance's Lark format. `call_grammar` is that of an answer that calls
    tools, or may call them. Its last argument is the rule of an answer without calls; "": any text.
    It raises ValueError if the parameters of a tool cannot be followed. `reasoning_grammar` has the
    reasoning and the rule `@answer` after it; it is "" without reasoning.
    """

    calls_name: str | None  # of the format of tool calls; None: not known
    reasoning_name: str | None  # of the format of the reasoning; None: the model shows none
    reasoning_mark: str  # the text that opens the reasoning; "" without one
    source: Source  # of the format of tool calls
    round_trips: bool  # the template's own calls were parsed back
    # The template refuses a message with several calls, or shows only the first (Llama 3.1).
    shows_one_call: bool
    parsing: Callable[[ToolUse, str], Parsing | None]  # None: the answers are plain text
    call_grammar: Callable[[ToolUse, str, JsonOptions, str], str]
    reasoning_grammar: Callable[[str, JsonOptions], str]
    # Takes a number of tokens. Returns the limit of the thoughts in the form of
    # `engine.protocol.thoughts`. None: the model shows none.
    limit_thoughts: Callable[[int, str], str] | None
