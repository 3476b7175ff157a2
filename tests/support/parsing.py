"""Parse answers in pieces, and compare what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from server.text.parsers.formats import AnyCallFormat, Reasoning
from server.text.parsers.marks import Marks
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.parsers.tools import Tool


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


def parse(
    syntax: Syntax,
    pieces: Sequence[str],
    tools: Mapping[str, Tool],
    *,
    start: State = State.CONTENT,
    is_cut: bool = False,
) -> Answer:
    """Parse pieces of a marked text as a stream, taking the deltas after each."""
    parser = AnswerParser(syntax, tools, start=start)
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for index in range(len(pieces) + 1):
        if index < len(pieces):
            parser.push(pieces[index])
        else:
            parser.flush(is_cut=is_cut)
        for delta in parser.take():
            match delta:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallDelta(at, call_id, name, arguments):
                    assert (call_id is None) == (name is None)
                    if name is not None:
                        assert at == len(calls)
                        calls.append((name, ""))
                    assert at == len(calls) - 1
                    calls[at] = (calls[at][0], calls[at][1] + arguments)
    return Answer(content, reasoning, calls, list(parser.outcomes))


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
    for at in range(1, len(marked), every):
        assert parse(syntax, [marked[:at], marked[at:]], tools, start=start) == whole, at
        cut = parse(syntax, [marked[:at]], tools, start=start, is_cut=True)
        assert cut == parse(syntax, list(marked[:at]), tools, start=start, is_cut=True)
        assert whole.content.startswith(cut.content), (at, cut)
        assert whole.reasoning.startswith(cut.reasoning), (at, cut)
        assert len(cut.calls) <= len(whole.calls)
        for (name, arguments), (whole_name, whole_arguments) in zip(
            cut.calls, whole.calls, strict=False
        ):
            assert name == whole_name
            assert whole_arguments.startswith(arguments), (at, cut)
