"""Syntax: a format compiled to the states and terminals of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from server.text.marks import Marks
from server.text.parsers.formats import (
    NO_OTHER_MARKS,
    AnyCallFormat,
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    OtherMarks,
    PythonCall,
    Reasoning,
    TaggedCall,
)
from server.text.parsers.input_form import end_mark_of
from server.text.parsers.lexer import Terminals


class State(Enum):
    """The meaning of the text."""

    CONTENT = auto()
    REASONING = auto()
    BETWEEN = auto()  # dropped: between two messages
    SECTION = auto()  # dropped: before and after the calls of a section
    CLOSING = auto()  # dropped: between the end of a call and its closing mark
    HEADER = auto()  # of a message; it says what follows
    NAME = auto()
    ARGUMENTS = auto()  # a JSON object
    PARAMETERS = auto()  # dropped: before and after the arguments of a call
    KEY = auto()
    BEFORE_VALUE = auto()  # dropped: between a key and its value
    VALUE = auto()
    JSON_VALUE = auto()
    INPUT = auto()  # of a custom tool, held by a grammar
    CALLS = auto()  # one or more whole calls, in a notation that ends itself
    MALFORMED = auto()  # the rest of a call that cannot be read

    __hash__ = object.__hash__  # that of Enum is Python code, and each token needs one


PROSE = (State.CONTENT, State.REASONING)
DROPPED = (State.BETWEEN, State.SECTION, State.CLOSING, State.PARAMETERS, State.BEFORE_VALUE)
SCANNED = (State.ARGUMENTS, State.CALLS)
BEFORE_NAME = (State.SECTION, State.NAME, State.HEADER, State.CALLS)
LIMITED = (State.NAME, State.HEADER)
Transitions = dict[State, dict[str, State]]


@dataclass(frozen=True)
class Syntax:
    """The states of one model's answers. In a state, each terminal leads to the next state."""

    format: AnyCallFormat | None  # None: no calls
    marks: Marks
    transitions: Mapping[State, Mapping[str, State]]
    terminals: Mapping[State, Terminals]
    reasoning_open: str  # as a terminal; "": none
    after_call: State  # where a call without a closing mark leads
    closes_call: bool  # a closing mark follows
    prefix: str  # as a terminal, before calls without marks; "": none

    @property
    def is_bare(self) -> bool:
        return self.format is not None and self.format.is_bare

    @property
    def call_openings(self) -> tuple[str, ...]:
        """The characters that begin calls in State.CALLS, where calls may follow each other."""
        match body_of(self.format):
            case JsonCall():
                return ("{", "[")
            case PythonCall():
                return ("[",)
        return ()

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to parse. A format without marks has no transitions."""
        return self.format is None and not any(self.transitions.values())


def literals(
    format: AnyCallFormat | None,
    reasoning: Reasoning | None,
    other: OtherMarks = NO_OTHER_MARKS,
) -> list[str]:
    """Return all fixed texts of a format, to find the tokens in them."""
    texts = [reasoning.open, reasoning.close] if reasoning else []
    texts += other.dropped
    for alias in other.aliases.values():
        texts += alias
    match format:
        case ChannelFormat():
            texts += [format.start, format.channel, format.message, format.end]
            texts += [format.call_end, format.final_end, format.constrain]
        case CallFormat():
            texts += [format.open, format.close, format.section_open, format.section_close]
            texts.append(format.prefix)
            match format.body:
                case NamedCall(separator=separator, inside=inside):
                    texts += [separator, *inside]
                case TaggedCall() as body:
                    texts += [body.name_end, body.key_open, body.key_close, body.value_close]
                    texts += [body.value_open, body.json_key_close]
                case LinesCall(name_end=name_end, key_end=key_end):
                    texts += [name_end, key_end]
                case GemmaCall(quote=quote):
                    texts.append(quote)
    return [text for text in texts if text]


def make_syntax(
    format: AnyCallFormat | None,
    reasoning: Reasoning | None,
    marks: Marks,
    other: OtherMarks = NO_OTHER_MARKS,
) -> Syntax:
    """Compile a format. `marks` are of the tokens in its literals."""
    transitions: Transitions = {state: {} for state in State}
    transitions[State.CONTENT] |= dict.fromkeys(other.dropped, State.CONTENT)
    prefix = format.prefix if isinstance(format, CallFormat) else ""
    if prefix:
        transitions[State.CONTENT][prefix] = State.CONTENT
    after, closes = State.CONTENT, False
    match format:
        case CallFormat():
            after, closes = _add_calls(transitions, format)
        case ChannelFormat():
            after = _add_channels(transitions, format)
    if reasoning:
        transitions[State.CONTENT][reasoning.open] = State.REASONING
        transitions[State.REASONING][reasoning.close] = State.CONTENT
        if reasoning.begins_answer:
            transitions[State.REASONING][reasoning.open] = State.REASONING
    for exits in transitions.values():
        _add_aliases(exits, other)
    encoded = {state: _encoded(exits, marks) for state, exits in transitions.items()}
    if isinstance(format, CallFormat) and isinstance(format.body, LinesCall):
        _add_line_ends(encoded, format.body)
    _keep_newlines(encoded, format, marks)
    if end := end_mark_of(format, marks):
        encoded[State.INPUT][end] = after
    return Syntax(
        format=format,
        marks=marks,
        transitions=encoded,
        terminals={state: Terminals(exits) for state, exits in encoded.items()},
        reasoning_open=marks.encode(reasoning.open.strip()) if reasoning else "",
        after_call=after,
        closes_call=closes,
        prefix=marks.encode(prefix),
    )


def _add_aliases(exits: dict[str, State], other: OtherMarks) -> None:
    for text, then in list(exits.items()):
        exits |= dict.fromkeys(other.aliases.get(text, ()), then)


def _encoded(exits: Mapping[str, State], marks: Marks) -> dict[str, State]:
    """Return the transitions by the texts that the parser finds: marks without space around."""
    return {marks.encode(text.strip()): then for text, then in exits.items() if text.strip()}


def _add_line_ends(encoded: Transitions, body: LinesCall) -> None:
    """Add the ends of lines, which are terminals although they are white space."""
    encoded[State.KEY][body.line_end] = State.KEY  # a line without a value is dropped
    encoded[State.VALUE][body.line_end] = State.KEY
    if not body.name_end.strip():
        encoded[State.NAME][body.line_end] = State.KEY


def _keep_newlines(encoded: Transitions, format: AnyCallFormat | None, marks: Marks) -> None:
    """Make one line break at each end of a value part of its tags, where the format has it.

    Only there does white space count: other text is stripped.
    """
    if not isinstance(format, CallFormat) or not isinstance(format.body, TaggedCall):
        return
    if not format.body.value_close.startswith("\n"):
        return
    for state in (State.KEY, State.VALUE):
        exits = encoded[state]
        for text, then in list(exits.items()):
            exits[f"{text}\n" if state is State.KEY else f"\n{text}"] = then


def _add_channels(transitions: Transitions, format: ChannelFormat) -> State:
    begin = {format.start: State.HEADER, format.channel: State.HEADER}
    end = {format.end: State.BETWEEN, format.final_end: State.BETWEEN}
    transitions[State.CONTENT] |= begin | end
    transitions[State.HEADER][format.message] = State.CONTENT  # or what the header says
    transitions[State.BETWEEN] |= begin | end | {format.call_end: State.BETWEEN}
    transitions[State.REASONING] |= {**begin, format.end: State.BETWEEN}
    transitions[State.MALFORMED] |= {format.call_end: State.BETWEEN, **begin}
    return State.BETWEEN


def _add_calls(transitions: Transitions, format: CallFormat) -> tuple[State, bool]:
    """Add the states of calls. Return the state after a call, and whether a mark closes calls."""
    has_section = bool(format.section_open)
    outside = State.SECTION if has_section else State.CONTENT
    first = _first_state(format)
    if has_section:
        # Without a mark of its own, a call begins where the section does.
        inside = State.SECTION if format.open else first
        transitions[State.CONTENT][format.section_open] = inside
        transitions[State.SECTION][format.section_open] = inside
        transitions[State.SECTION][format.section_close] = State.CONTENT
    if format.open:
        transitions[outside][format.open] = first
        if has_section and (format.is_section_optional or format.open.startswith("<|")):
            transitions[State.CONTENT][format.open] = first
    match format.body:
        case NamedCall(separator=separator):
            transitions[State.NAME][separator] = State.ARGUMENTS
        case TaggedCall() as body:
            _add_tags(transitions, body)
        case LinesCall() as lines:
            transitions[State.NAME][lines.name_end] = State.KEY
            transitions[State.KEY][lines.key_end] = State.VALUE
    closing = {format.close: outside} if format.close else {}
    if has_section and not format.close:
        closing = {format.section_close: State.CONTENT} if format.section_close else {}
    if isinstance(format.body, TaggedCall):
        transitions[State.PARAMETERS] |= closing
        transitions[State.NAME] |= closing
    if isinstance(format.body, LinesCall):
        for state in (State.NAME, State.KEY, State.VALUE):
            transitions[state] |= closing
    transitions[State.CLOSING] |= closing
    if closing and isinstance(format.body, JsonCall | PythonCall):  # a closing mark may be left out
        transitions[State.CLOSING][format.open or format.section_open] = first
    transitions[State.MALFORMED] |= closing
    after = outside if format.open or not has_section or format.section_close else State.CONTENT
    return after, bool(closing)


def _first_state(format: CallFormat) -> State:
    if isinstance(format.body, NamedCall | TaggedCall | LinesCall):
        return State.NAME
    return State.CALLS


def _add_tags(transitions: Transitions, body: TaggedCall) -> None:
    if body.name_end:
        transitions[State.NAME][body.name_end] = State.PARAMETERS
    else:
        transitions[State.NAME][body.key_open] = State.KEY
    transitions[State.PARAMETERS][body.key_open] = State.KEY
    if body.value_open:
        transitions[State.KEY][body.key_close] = State.BEFORE_VALUE
        transitions[State.BEFORE_VALUE][body.value_open] = State.VALUE
    else:
        transitions[State.KEY][body.key_close] = State.VALUE
    transitions[State.VALUE][body.value_close] = State.PARAMETERS
    if body.json_key_close:
        transitions[State.KEY][body.json_key_close] = State.JSON_VALUE
        transitions[State.JSON_VALUE][body.value_close] = State.PARAMETERS


def body_of(format: AnyCallFormat | None) -> JsonCall | PythonCall | GemmaCall | None:
    """Return the notation of State.CALLS."""
    if isinstance(format, CallFormat) and isinstance(
        format.body, JsonCall | PythonCall | GemmaCall
    ):
        return format.body
    return None
