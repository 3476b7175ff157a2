"""Parse answers in pieces, and compare what comes out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from server.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from server.text.marks import Marks
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.formats import AnyCallFormat, Reasoning
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.tools import Tool


def syntax_of(
    format: AnyCallFormat | None, reasoning: Reasoning | None = None, *, tokens: bool
) -> Syntax:
    """Return a syntax whose marks are tokens, or texts."""
    texts = [text.strip() for text in literals(format, reasoning)]
    marks = [text for text in texts if text[0] in "<[" and text[-1] in ">]"] if tokens else []
    ids = {text: index for index, text in enumerate(dict.fromkeys(marks))}
    return make_syntax(format, reasoning, Marks(ids, ids.values()))


class Answer(NamedTuple):
    """An answer, with its deltas joined."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # names, and arguments as JSON text
    outcomes: list[str]


class Stream:
    """A parser, and the sum of its deltas."""

    def __init__(self, syntax: Syntax, tools: Mapping[str, Tool], start: State) -> None:
        self.parser = AnswerParser(syntax, tools, start=start)
        self._shared = {id(part): part for part in (syntax, tools)}  # kept by a copy
        self._content = self._reasoning = ""
        self._calls: list[tuple[str, str]] = []

    def push(self, piece: str) -> None:
        self.parser.push(piece)
        self._take()

    def end(self, *, is_cut: bool = False) -> Answer:
        self.parser.flush(is_cut=is_cut)
        self._take()
        return Answer(self._content, self._reasoning, self._calls, list(self.parser.outcomes))

    def copy(self) -> Stream:
        """Return a stream that goes on from here without changing this one."""
        return copy.deepcopy(self, dict(self._shared))

    def _take(self) -> None:
        calls = self._calls
        for delta in self.parser.take():
            match delta:
                case ContentDelta(text):
                    self._content += text
                case ReasoningDelta(text):
                    self._reasoning += text
                case ToolCallDelta(at, call_id, name, arguments):
                    assert (call_id is None) == (name is None)
                    if name is not None:
                        assert at == len(calls)
                        calls.append((name, ""))
                    assert at == len(calls) - 1
                    calls[at] = (calls[at][0], calls[at][1] + arguments)


def parse(
    syntax: Syntax,
    pieces: Sequence[str],
    tools: Mapping[str, Tool],
    *,
    start: State = State.CONTENT,
    is_cut: bool = False,
) -> Answer:
    """Parse pieces of a marked text as a stream, taking the deltas after each."""
    stream = Stream(syntax, tools, start)
    for piece in pieces:
        stream.push(piece)
    return stream.end(is_cut=is_cut)


def check_cuts(
    syntax: Syntax,
    text: str,
    tools: Mapping[str, Tool],
    *,
    start: State = State.CONTENT,
    every: int = 1,
) -> None:
    """Check that no split changes an answer, and that a cut one is a beginning of it.

    The splits are `every` characters apart.
    """
    marked = syntax.marks.encode(text)
    whole = parse(syntax, [marked], tools, start=start)
    assert parse(syntax, list(marked), tools, start=start) == whole
    characters = Stream(syntax, tools, start)
    for at, character in enumerate(marked):
        if at and at % every == 1 % every:
            assert parse(syntax, [marked[:at], marked[at:]], tools, start=start) == whole, at
            cut = parse(syntax, [marked[:at]], tools, start=start, is_cut=True)
            assert characters.copy().end(is_cut=True) == cut, at
            check_beginning(cut, whole, at)
        characters.push(character)


def check_beginning(cut: Answer, whole: Answer, at: int) -> None:
    """Check that the answer cut at a character is a beginning of the whole one."""
    assert whole.content.startswith(cut.content), (at, cut)
    assert whole.reasoning.startswith(cut.reasoning), (at, cut)
    assert len(cut.calls) <= len(whole.calls)
    for (name, arguments), (whole_name, whole_arguments) in zip(
        cut.calls, whole.calls, strict=False
    ):
        assert name == whole_name
        assert whole_arguments.startswith(arguments), (at, cut)
