"""The limit of the thoughts in an answer, in the marks of the model's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from engine.protocol.thoughts import ThoughtLimit
from server.text.marks import Marks
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import ChannelFormat
from server.text.parsers.syntax import State
from server.text.tokenizer import Tokenizer

MAX_HEADER = 512  # characters of a message's header
THOUGHTS = "analysis"  # the channel of thoughts
NUM_MARKS = 5  # of channels

# Takes the budget in tokens and the text of the prompt. Returns a ThoughtLimit as JSON.
LimitThoughts = Callable[[int, str], str]


@dataclass(frozen=True)
class Expressions:
    """The expressions of a ThoughtLimit."""

    opening: str
    closing: str
    opens_first: bool
    before: str  # the mark of a header that the prompt may end with
    reach: int


def thought_limiter(found: AnswerFormat, tokenizer: Tokenizer) -> LimitThoughts | None:
    """Return the function that limits the thoughts of an answer.

    None if the model shows no thoughts, or has no tokens for the mark that ends them.
    """
    format, reasoning = found.calls, found.reasoning
    if isinstance(format, ChannelFormat):
        closing, expressions = f"{format.end}{format.start}assistant", _of_channels(found, format)
    elif reasoning is not None:
        closing, expressions = reasoning.close.strip(), _of_marks(found)
    else:
        return None
    ids = tokenizer.encode(closing, add_special_tokens=False)
    if closing not in tokenizer.decode(ids, skip_special_tokens=False):
        return None
    if not tokenizer.eos_token_ids:
        return None
    reopening_tokens, reopens_after = _reopening(found, tokenizer)

    def limited(budget: int, prompt: str) -> str:
        start = found.start(prompt)
        limit = ThoughtLimit(
            budget=budget,
            is_open=start is State.REASONING,
            before=expressions.before if start is State.HEADER else "",
            opening=expressions.opening,
            opens_first=expressions.opens_first,
            closing=expressions.closing,
            marks=found.plain_syntax.marks.ids,
            reach=expressions.reach,
            closing_tokens=tuple(ids),
            reopening_tokens=reopening_tokens,
            reopens_after=reopens_after,
            end_tokens=tuple(tokenizer.eos_token_ids),
        )
        return msgspec.json.encode(limit).decode()

    return limited


def _of_marks(found: AnswerFormat) -> Expressions:
    """Return the expressions of thoughts between two marks."""
    syntax = found.plain_syntax
    content, thoughts = syntax.transitions[State.CONTENT], syntax.transitions[State.REASONING]
    openings = [text for text, then in content.items() if then is State.REASONING]
    closings = [text for text, then in thoughts.items() if then is not State.REASONING]
    return Expressions(
        opening=_any_of(openings, syntax.marks),
        closing=_any_of(closings, syntax.marks),
        opens_first=not any(char in syntax.marks.ids for text in openings for char in text),
        before="",
        reach=_reach([*openings, *closings], syntax.marks),
    )


def _reach(texts: Sequence[str], marks: Marks) -> int:
    """Return how many characters of a text stand behind its last mark, at most; -1 without one."""
    if not all(text[0] in marks.ids for text in texts):
        return -1
    return max((len(text.encode()) for text in texts if text[-1] not in marks.ids), default=0)


def _of_channels(found: AnswerFormat, format: ChannelFormat) -> Expressions:
    """Return the expressions of messages whose header names the channel of thoughts.

    A header that also names a function begins a call.
    """
    marks = found.plain_syntax.marks
    start, channel, message, *ends = (
        _expression(marks.encode(text), marks)
        for text in (format.start, format.channel, format.message, format.end, format.final_end)
    )
    inside = f"(?:(?!{message}|{start}|{channel}).){{0,{MAX_HEADER}}}?"
    no_call = f"(?!{inside}to=)"
    return Expressions(
        opening=f"(?:{start}|{channel}){no_call}{inside}{THOUGHTS}{inside}{message}",
        closing=f"{'|'.join(ends)}|(?={start}|{channel})",  # also without an end, by a new header
        opens_first=False,
        before=_bytes(marks.encode(format.start), marks),
        # Headers begin with marks and end with one.
        reach=0 if len({start, channel, message, *ends} & marks.ids.keys()) == NUM_MARKS else -1,
    )


def _reopening(found: AnswerFormat, tokenizer: Tokenizer) -> tuple[tuple[int, ...], int]:
    """Return the tokens that begin thoughts, and the token that they do so behind; -1: any."""
    marks = found.plain_syntax.marks
    if isinstance(found.calls, ChannelFormat):
        channel = tokenizer.added_ids.get(found.calls.channel)
        if channel is None:
            return (), -1
        begun = [THOUGHTS[:end] for end in range(1, len(THOUGHTS) + 1)]
        encoded = [
            tokenizer.encode(f"{space}{text}", add_special_tokens=False)
            for text in begun
            for space in ("", " ")
        ]
        return tuple(sorted({ids[0] for ids in encoded if len(ids) == 1})), channel
    content = found.plain_syntax.transitions[State.CONTENT]
    openings = [text for text, then in content.items() if then is State.REASONING]
    return tuple(marks.ids[text[0]] for text in openings if text[0] in marks.ids), -1


def _any_of(texts: Iterable[str], marks: Marks) -> str:
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(_expression(text, marks) for text in longest_first)


def _expression(encoded: str, marks: Marks) -> str:
    """Return the expression of a text with marks."""
    return re.escape(_bytes(encoded, marks))


def _bytes(encoded: str, marks: Marks) -> str:
    """Return a text with marks, in which one character stands for each byte of other text."""
    parts = [char if char in marks.ids else char.encode().decode("latin-1") for char in encoded]
    return "".join(parts)
