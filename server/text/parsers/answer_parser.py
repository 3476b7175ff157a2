"""AnswerParser: the text of an answer becomes content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping

from server.text.deltas import CallOutcome, ContentDelta, Delta, ReasoningDelta, merged
from server.text.parsers.calls import Calls
from server.text.parsers.input_form import HeldInput
from server.text.parsers.json_scanner import JsonScanner
from server.text.parsers.names import called_by_header, named_in
from server.text.parsers.prose import BETWEEN_CALLS, SPACE, Prose
from server.text.parsers.scanners import Scanner, input_of, scanner_of, value_of
from server.text.parsers.syntax import BEFORE_NAME, DROPPED, LIMITED, PROSE, SCANNED, State, Syntax
from server.text.parsers.tagged_value import TaggedValue
from server.text.tools import Tool

MAX_NAME = 512  # characters before a call's arguments


class AnswerParser:
    """Splits one answer into events. The result does not depend on how the text is cut.

    `push` takes text with marks (`server.text.marks`), `flush` ends it, and `take` returns
    what is known by then. White space between prose and a mark is dropped.

    A text that looks like a call and is none is content. Once its name has been read, a malformed
    call stays a call, and its arguments are passed on as they are: a client can report the error to
    the model.
    """

    def __init__(
        self,
        syntax: Syntax,
        tools: Mapping[str, Tool],
        *,
        start: State = State.CONTENT,
        shows_special: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._syntax = syntax
        self._shown = syntax.marks.text if shows_special else syntax.marks.shown
        self._state = start
        self._deltas: list[Delta] = []
        id_style = syntax.format.id_style if syntax.format else "call"
        self.calls = Calls(tools, id_style, self._deltas.append)
        self._pending = ""  # not processed: the possible beginning of a terminal
        self._raw: list[str] = []  # of a call whose name is not known
        self._collected: list[str] = []  # of a name, key or header
        self._num_collected = 0  # characters
        self._dropped: list[str] = []
        self._num_before_section = 0  # calls
        self._value: TaggedValue | HeldInput | None = None
        self._scanner: Scanner | None = None
        self._prose = Prose(self._emit, strips=start is not State.CONTENT)
        self._has_content = False
        self._has_junk = False  # between a call and its closing mark
        self._most_calls = most_calls  # no text is read after the last one
        self.is_full = most_calls == 0  # it has that many

    @property
    def is_reasoning(self) -> bool:
        return self._state is State.REASONING

    @property
    def is_in_call(self) -> bool:
        """Whether the text is inside a call. Without a mark, a name must have been read."""
        is_named = self._syntax.is_bare or self._state not in BEFORE_NAME
        return self.calls.is_open or not is_named

    @property
    def has_calls(self) -> bool:
        return self.calls.has_any

    @property
    def outcomes(self) -> list[CallOutcome]:
        """The fate of each call, and of each text that looked like one."""
        return self.calls.outcomes + self.calls.malformed

    def take(self) -> list[Delta]:
        """Return the events since the last call; neighbours of one kind are merged."""
        deltas = merged(self._deltas)
        self._deltas.clear()
        return deltas

    def push(self, text: str) -> None:
        if self.is_full:
            return
        if self._is_plain(text):
            self._prose.push(self._shown(text))
            return
        self._pending += text
        self._run(is_end=False)

    def _is_plain(self, text: str) -> bool:
        """Return whether a text within an answer or its reasoning has nothing to parse."""
        if self._pending or self._state not in PROSE:
            return False
        if self._state is State.CONTENT and not self._has_content:
            return False
        return self._syntax.terminals[self._state].are_absent(text)

    def flush(self, *, is_cut: bool) -> None:
        """End the text. With `is_cut` the model had not finished: an unfinished call stays so."""
        if self.is_full:
            return
        if is_cut and self._may_be_before_mark:
            self._pending = ""  # perhaps the beginning of a mark
            self._prose.begin(strips=False)
        self._run(is_end=True)
        if self._state is not State.CONTENT and not is_cut:
            self._end_unfinished()
        if self._may_begin_bare_call and self.calls.has_any:
            self._prose.begin()  # drops what separates calls
        if self._state is State.CONTENT:
            self._prose.end()

    @property
    def _may_be_before_mark(self) -> bool:
        """Whether what is held back may be, or precede, the beginning of a mark."""
        is_plain = self._syntax.format is None and self._state is State.CONTENT
        return not is_plain or not self._has_content

    def _end_unfinished(self) -> None:
        """The model ended its answer within a call."""
        if self.calls.is_open:
            if self._value is not None:
                self._value.end()
            self.calls.end()
        elif self._state in BEFORE_NAME and not (
            self._state is State.SECTION and self.calls.has_any
        ):
            self._not_a_call()
        elif self._state is State.CLOSING and self._has_dropped_text:
            self._state = State.CONTENT
            self._emit(self._syntax.marks.text("".join(self._dropped)))

    @property
    def _has_dropped_text(self) -> bool:
        return any(text.strip() for text in self._dropped)

    # ---- steps -----------------------------------------------------------------------------------

    def _run(self, *, is_end: bool) -> None:
        at = 0
        while not self.is_full:
            before = at, self._state
            at = self._step(at, is_end=is_end)
            most = self._most_calls
            self.is_full = most is not None and len(self.calls.outcomes) >= most
            if before == (at, self._state):
                break
        self._pending = self._pending[at:]

    def _step(self, at: int, *, is_end: bool) -> int:
        """Process text from position `at`. Return the position after it."""
        if self._state in SCANNED:
            return self._scan(at)
        if self._may_begin_bare_call:
            start = self._skipped(at)
            if start > at:
                return start
            if self._pending[at : at + 1] in self._syntax.call_openings:
                space = self._prose.space
                self._enter(State.CALLS)
                self._raw = [space]
                return at
        if self._may_begin_next_call and at < len(self._pending):
            char = self._pending[at]
            if char in BETWEEN_CALLS:
                self._dropped.append(char)
                return at + 1
            if char in self._syntax.call_openings:
                self._enter(State.CALLS)
                return at
        room = MAX_NAME + 1 - self._num_collected if self._state in LIMITED else None
        terminals = self._syntax.terminals[self._state]
        found = terminals.find(self._pending, at, is_end=is_end, within=room)
        text = self._pending[at : found.before]
        if room is not None and len(text) > room:  # other terminals hold after it
            self._take_text(text[:room])
            return at + room
        self._take_text(text)
        if found.terminal is None:
            return found.before
        if self._is_out_of_place(found.terminal):
            self._take_text(found.terminal)
        elif found.terminal == self._syntax.prefix:
            self._prose.hold(self._shown(found.terminal))
        else:
            if self._state is State.CONTENT:
                self._raw = [self._prose.space]
            self._raw.append(found.terminal)
            self._leave(self._syntax.transitions[self._state][found.terminal])
        return found.end

    def _is_out_of_place(self, terminal: str) -> bool:
        """Return whether a text that opens reasoning stands after the start of the answer.

        A token does not: models that have one may think again. The prefix of calls without marks is
        out of place there, too, and so is a token before the input of a custom tool.
        """
        if terminal == self._syntax.prefix:
            return self._has_content
        if isinstance(self._value, HeldInput) and not self._value.has_begun:
            return True
        opens = self._state is State.CONTENT and terminal == self._syntax.reasoning_open
        return opens and self._has_content and self._syntax.marks.text(terminal) == terminal

    @property
    def _may_begin_bare_call(self) -> bool:
        """In a format without marks, a call begins the answer or follows another call."""
        is_first = self._state is State.CONTENT and not self._has_content
        return is_first and self._syntax.is_bare

    @property
    def _may_begin_next_call(self) -> bool:
        """Some models write several calls before one closing mark."""
        return self._state is State.CLOSING and not self._has_junk

    def _skipped(self, at: int) -> int:
        """Skip what may stand before such a call, as white space. Return the position after it."""
        start = at
        while at < len(self._pending) and self._is_skipped(self._pending[at]):
            at += 1
        self._prose.hold(self._shown(self._pending[start:at]))
        return at

    def _is_skipped(self, char: str) -> bool:
        if char in self._syntax.transitions[State.CONTENT]:
            return False
        is_separator = self.calls.has_any and char in ";,"
        return is_separator or char in SPACE or not self._shown(char)

    # ---- text ------------------------------------------------------------------------------------

    def _take_text(self, text: str) -> None:
        """Take text of the current state."""
        if self._state in PROSE:
            self._prose.push(self._shown(text))
        elif self._state in DROPPED:
            self._dropped.append(text)
            self._has_junk = self._has_junk or bool(text)
            if self._state is State.SECTION:
                self._raw.append(text)
        elif self._state is State.MALFORMED:
            self.calls.arguments(self._syntax.marks.text(text))
        elif self._value is not None:
            self._value.push(self._syntax.marks.text(text))
        else:
            self._collect(text)

    def _collect(self, text: str) -> None:
        self._collected.append(text)
        self._raw.append(text)
        self._num_collected += len(text)
        if self._num_collected > MAX_NAME and self._state in LIMITED:
            self._not_a_call()

    def _take_collected(self) -> str:
        return self._syntax.marks.text("".join(self._collected))

    def _emit(self, text: str) -> None:
        if self._state is State.REASONING:
            self._deltas.append(ReasoningDelta(text))
        else:
            self._has_content = True
            self._deltas.append(ContentDelta(text))

    # ---- transitions -----------------------------------------------------------------------------

    def _leave(self, then: State) -> None:
        """Go to the next state after a terminal."""
        match self._state:
            case State.NAME:
                if not self._end_name():
                    return
                if then in (State.CONTENT, State.SECTION):
                    self.calls.end()  # it has no arguments
            case State.HEADER:
                then = self._end_header()
            case State.KEY if then in (State.VALUE, State.JSON_VALUE, State.BEFORE_VALUE):
                self._begin_value(then)
            case State.KEY if then is not State.KEY:
                self.calls.end()
            case State.INPUT | State.VALUE | State.JSON_VALUE:
                self._end_value()
                if then in (State.CONTENT, State.SECTION):
                    self.calls.end()
            case State.MALFORMED:
                self.calls.end()
            case State.PARAMETERS if then is not State.KEY:
                self.calls.end()
            case State.SECTION if then is State.CONTENT and self._is_section_without_calls:
                self._not_a_call()
                return
        self._enter(then)

    @property
    def _is_section_without_calls(self) -> bool:
        return self.calls.count == self._num_before_section and self._has_dropped_text

    def _enter(self, then: State) -> None:
        if then is self._state is State.SECTION:
            return  # opened twice
        if self.calls.awaits_input:
            then = State.INPUT
            self._value = input_of(self._syntax, self.calls)
        begins_section = then is State.SECTION and self._state is State.CONTENT
        if begins_section:
            self._num_before_section = self.calls.count
        elif then in (*PROSE, *DROPPED):
            self._raw.clear()
        self._state = then
        self._prose.begin()
        self._dropped.clear()
        self._has_junk = False
        self._collected.clear()
        self._num_collected = 0
        self._scanner = scanner_of(self._syntax, then, self.calls) if then in SCANNED else None

    def _end_name(self) -> bool:
        """Begin the call whose name has been read. Return whether it is one."""
        found = named_in(self._syntax.format, self._take_collected())
        if found is None:
            self._not_a_call()
            return False
        self._begin_call(*found)
        return True

    def _begin_call(self, name: str, call_id: str | None) -> None:
        self.calls.begin(name, call_id)
        self._raw.clear()

    def _end_header(self) -> State:
        """Return what the message is, by its header."""
        header = self._take_collected()
        name = called_by_header(header)
        if name is not None:
            self._begin_call(name, None)
            return State.ARGUMENTS
        return State.REASONING if "analysis" in header else State.CONTENT

    def _begin_value(self, then: State) -> None:
        key = self._take_collected().strip()
        self._value = value_of(self._syntax, then, self.calls, key)

    def _end_value(self) -> None:
        assert self._value is not None
        self._value.end()
        self._value = None

    # ---- notations that end themselves -----------------------------------------------------------

    def _scan(self, at: int) -> int:
        scanner = self._scanner
        assert scanner is not None
        num_changes = self.calls.num_changes
        end = at
        # Stop where a call begins or ends, to know the text between calls.
        while end < len(self._pending) and self.calls.num_changes == num_changes:
            if scanner.is_done or scanner.is_broken:
                break
            end = scanner.step(self._pending, end)
        self._raw.append(self._pending[at:end])
        if self.calls.is_open or self.calls.num_changes > num_changes:
            self._raw.clear()
        if isinstance(scanner, JsonScanner):
            self.calls.arguments(scanner.take())
        if self.calls.awaits_input:
            self._enter(State.INPUT)
        elif scanner.is_broken:
            self._break()
        elif scanner.is_done:
            self._end_scan(scanner)
        return end

    def _break(self) -> None:
        """Go on after text that cannot be read as a call."""
        if self.calls.is_open:
            self._enter(State.MALFORMED)
        else:
            self._not_a_call()

    def _end_scan(self, scanner: Scanner) -> None:
        if isinstance(scanner, JsonScanner):
            self.calls.end()
        self._enter(State.CLOSING if self._syntax.closes_call else self._syntax.after_call)
        if self._syntax.is_bare:
            self._has_content = False

    def _not_a_call(self) -> None:
        """Give back the text since the mark as content."""
        if not self._syntax.is_bare:  # without marks, any JSON looks like a call
            self.calls.malformed.append("malformed")
        text = self._syntax.marks.text("".join(self._raw))
        self._enter(State.CONTENT)
        self._prose.begin(strips=False)
        self._prose.push(text)
