"""ThoughtLimit: how many tokens an answer may think, and how the model marks its thoughts.

It is the member `thoughts` of a grammar's source, next to llguidance's `grammars`. Without any
grammar, the answer is free except for the limit.

The expressions are of Python's `re`. They match text in which one character stands for one byte of
UTF-8, and one character of `marks` for each token that is a mark.
"""

from __future__ import annotations

import msgspec


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limit, and the marks that begin and end thoughts."""

    budget: int  # tokens of all thoughts of an answer, without their marks
    is_open: bool  # the prompt ends within thoughts
    before: str = ""  # the text in front of the answer, if a mark may begin there
    opening: str  # expression of the text that begins thoughts
    opens_first: bool = False  # thoughts begin only where the content does
    closing: str  # expression of the text that ends thoughts
    marks: dict[str, int]  # tokens by character
    # Characters behind a mark in which other text can complete an expression. -1: anywhere.
    reach: int = -1
    closing_tokens: tuple[int, ...]  # written when the budget is spent
    # Tokens that would begin more thoughts then. They are banned behind `reopens_after`; -1:
    # everywhere.
    reopening_tokens: tuple[int, ...] = ()
    reopens_after: int = -1
    end_tokens: tuple[int, ...]  # of the model; none ends the answer within its thoughts


class LimitedSource(msgspec.Struct, frozen=True):
    """The members of a grammar's source that the engine reads itself."""

    thoughts: ThoughtLimit | None = None
    grammars: list[msgspec.Raw] = []


UNLIMITED = LimitedSource()
BEGINNING = '{"thoughts":'  # of a source with a limit; llguidance ignores the member
_decode = msgspec.json.Decoder(LimitedSource).decode


def limited_source(limit: str, grammar: str) -> str:
    """Return the source of an answer whose thoughts have a limit, a ThoughtLimit as JSON.

    `grammar` is the source of its grammar; "": none.
    """
    rest = grammar.removeprefix("{") if grammar else '"grammars":[]}'
    return f"{BEGINNING}{limit},{rest}"


def read_source(source: str) -> LimitedSource:
    """Return what `limited_source` wrote; UNLIMITED for other sources."""
    return _decode(source) if source.startswith(BEGINNING) else UNLIMITED
