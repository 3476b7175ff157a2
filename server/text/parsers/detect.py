"""Find out how a model writes reasoning and tool calls, from how its chat template renders them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from server.text.answers import Source
from server.text.chat_template import TemplateLimitError
from server.text.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.text.marks import Marks
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.formats import (
    CALL_FORMATS,
    REASONING,
    REASONING_BY_NAME,
    AnyCallFormat,
    CallFormat,
    ChannelFormat,
    JsonCall,
    NamedCall,
    Reasoning,
    TaggedCall,
)
from server.text.parsers.infer import infer_format
from server.text.parsers.response_template import NO_TEMPLATE, TranslatedTemplate
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.parsers.white_space import with_white_space
from server.text.tools import Tool

Messages = list[dict[str, Any]]
# Renders messages with template arguments. Raises an exception if the template refuses them.
Render = Callable[..., str]

PROBING_S = 3.0  # no rendering begins later than that
MAX_ANSWER = 8192  # characters that a template writes for two short calls
BETWEEN = "\U0010ffff"  # a character in no token, between texts that are searched for tokens
QUESTION = "What is new?"
REPLY = "Nothing is new."
THOUGHT = "Let me see."
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "a number"},
        "more": {"type": "object", "description": "an object"},
    },
    "required": ["city"],
}
CALLED = [
    ("probe_alpha", {"city": "Paris", "days": 3, "more": {"a": [1, True]}}),
    ("probe_beta", {"city": 'The "Hague"', "days": 5}),
]
# The names by which templates take the wish for reasoning.
REQUESTS_OF_REASONING: tuple[dict[str, Any], ...] = (
    {"reasoning_effort": "high"},
    {"enable_thinking": True},
    {"thinking": True},
)
# Some templates accept only such ids (Mistral's).
CALL_IDS = ["a1b2c3d4e", "f5g6h7i8j"]


def _definition(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "a probe", "parameters": PARAMETERS}
    return {"type": "function", "function": function}


PROBES = {name: Tool(name, PARAMETERS, _definition(name)) for name, _ in CALLED}


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers."""

    calls: AnyCallFormat | None
    reasoning: Reasoning | None
    source: Source  # of `calls`
    round_trips: bool  # the template's own calls were parsed back
    syntax: Syntax
    plain_syntax: Syntax  # for answers without tools
    # The prompt opens the reasoning of a request for it; without one, the model writes none.
    is_opened_on_request: bool = False
    # The template refuses a message with several calls, or shows only the first (Llama 3.1).
    shows_one_call: bool = False

    @property
    def reasoning_name(self) -> str | None:
        """The name of the format of the reasoning; None if the model shows none."""
        if isinstance(self.calls, ChannelFormat):
            return self.calls.name
        for name, reasoning in REASONING_BY_NAME.items():
            if reasoning == self.reasoning:
                return name
        return None

    def start(self, prompt: str) -> State:
        """Return the state that a prompt ends in: it may have opened the reasoning."""
        if isinstance(self.calls, ChannelFormat):
            header = prompt.rpartition(self.calls.start)[2]
            return State.CONTENT if self.calls.message in header else State.HEADER
        if self.reasoning is None:
            return State.CONTENT
        is_open = prompt.rstrip().endswith(self.reasoning.open.strip())
        return State.REASONING if is_open or self.reasoning.begins_answer else State.CONTENT


def detect(
    prober: Prober,
    *,
    calls: AnyCallFormat | None = None,
    reasoning: Reasoning | Literal["auto"] | None = "auto",
) -> AnswerFormat:
    """Return how a model writes its answers.

    `calls` and `reasoning` override what is found; a `reasoning` of None is none.
    """
    if reasoning == "auto":
        reasoning = prober.find_reasoning()
    if calls is None:
        found, source, round_trips = prober.find_calls(reasoning)
    else:
        found, source, round_trips = calls, "flag", prober.parses_back(calls, reasoning)
    plain = found if isinstance(found, ChannelFormat) else None
    return AnswerFormat(
        calls=found,
        reasoning=reasoning,
        source=source,
        round_trips=round_trips,
        syntax=prober.syntax(found, reasoning),
        plain_syntax=prober.syntax(plain, reasoning),
        is_opened_on_request=reasoning is not None and prober.opens_on_request(reasoning),
        shows_one_call=len(prober.called) == 1,
    )


class Prober:
    """Renders probes with one template, and parses them with formats.

    `template` is its source, and `tokens` are the added tokens of the tokenizer. `given` is what
    the checkpoint says itself; what it lacks is found from the template. `problems` say which parts
    of it are not used, and why. `ends` are the tokens that end an answer.
    """

    def __init__(
        self,
        render: Render,
        template: str,
        tokens: Mapping[str, int],
        special: frozenset[int],
        given: TranslatedTemplate = NO_TEMPLATE,
        ends: Collection[int] = (),
    ) -> None:
        self._given = given
        self.problems = list(given.problems)
        self._render = render
        self._deadline = time.monotonic() + PROBING_S
        self._template = template
        self._tokens = tokens
        self._special = special
        self._others = {  # inside calls they are text
            text: i for text, i in tokens.items() if i in special and i not in ends
        }
        user = {"role": "user", "content": QUESTION}
        self._prompt = self._rendered([user], add_generation_prompt=True) or ""
        self._opening = self._find_opening(user)
        self.answer, self.called = self._find_answer(user)

    def _find_answer(self, user: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text of an answer with calls, without what precedes it, and the calls."""
        for count in (2, 1):
            called = CALLED[:count]
            for more in ({"reasoning_content": THOUGHT, "thinking": THOUGHT}, {}):
                message = {"role": "assistant", "content": "", "tool_calls": _calls(called), **more}
                text = self._rendered([user, message], add_generation_prompt=False)
                if text and called[-1][0] in text.rpartition(QUESTION)[2]:
                    answer = self._after_prompt(text)
                    return (answer, called) if len(answer) <= MAX_ANSWER else ("", [])
        return "", []

    def _rendered(self, messages: Messages, **arguments: Any) -> str | None:
        """Return the text; None if the template fails, or is too slow to be probed further."""
        if time.monotonic() > self._deadline:
            return None
        tools = [tool.for_template for tool in PROBES.values()]
        try:
            return self._render(messages, tools=tools, **arguments)
        except TemplateLimitError:
            self._deadline = 0.0
        except Exception:  # a template may fail in any way
            return None
        return None

    def _after_prompt(self, text: str) -> str:
        """Return what follows the prompt in `text`, or what precedes every assistant's message.

        Reasoning that the prompt opens need not be there. The rest after the user's message remains
        if neither is there.
        """
        for reasoning in (None, self._given.reasoning, *REASONING):
            prompt = self._prompt
            if reasoning is not None:
                prompt = prompt.rstrip().removesuffix(reasoning.open.strip())
            if text.startswith(prompt):
                return text[len(prompt) :]
        if self._opening and text.startswith(self._opening):
            return text[len(self._opening) :]
        return text.rpartition(QUESTION)[2]

    def _find_opening(self, user: dict[str, Any]) -> str:
        """Return what a template writes up to the content of an assistant's message."""
        reply = {"role": "assistant", "content": REPLY}
        before, found, _ = (self._rendered([user, reply]) or "").partition(REPLY)
        return before if found else ""

    # Reasoning

    def find_reasoning(self) -> Reasoning | None:
        if self._given.reasoning or isinstance(self._given.calls, ChannelFormat):
            return self._given.reasoning
        tests = (self._is_opened_by_prompt, self._is_rendered, self._is_named, self._is_in_tokens)
        for test in tests:
            for reasoning in REASONING:
                if test(reasoning):
                    return reasoning
        return None

    def opens_on_request(self, reasoning: Reasoning) -> bool:
        """Return whether the prompt opens the reasoning only if a request wants it."""
        if self._is_opened_by_prompt(reasoning):
            return False
        user = {"role": "user", "content": QUESTION}
        for request in REQUESTS_OF_REASONING:
            text = self._rendered([user], add_generation_prompt=True, **request)
            if text is not None and text.rstrip().endswith(reasoning.open.strip()):
                return True
        return False

    def _is_opened_by_prompt(self, reasoning: Reasoning) -> bool:
        return self._prompt.rstrip().endswith(reasoning.open.strip())

    def _is_rendered(self, reasoning: Reasoning) -> bool:
        before, found, after = self.answer.partition(THOUGHT)
        is_open = before.rstrip().endswith(reasoning.open.strip())
        return bool(found) and is_open and after.lstrip().startswith(reasoning.close.strip())

    def _is_named(self, reasoning: Reasoning) -> bool:
        return (
            reasoning.open.strip() in self._template and reasoning.close.strip() in self._template
        )

    def _is_in_tokens(self, reasoning: Reasoning) -> bool:
        return reasoning.open.strip() in self._tokens and reasoning.close.strip() in self._tokens

    # Calls

    def find_calls(self, reasoning: Reasoning | None) -> tuple[AnyCallFormat | None, Source, bool]:
        """Return the format of the calls, where it comes from, and whether it round-trips."""
        given = self._given_calls(reasoning)
        if given is not None and self.parses_back(given, reasoning):
            return given, "response_template", True
        found, source = self._found_in_answer(reasoning)
        if found is not None:
            if given is not None:
                self.problems.append("field tool_calls: does not read what the template renders")
            return found, source, True
        if given is not None:
            return given, "response_template", False
        for format in CALL_FORMATS:
            if self._is_format_named(format):
                return format, "table", False
        return None, "none", False

    def _found_in_answer(self, reasoning: Reasoning | None) -> tuple[AnyCallFormat | None, Source]:
        """Return a format that reads the rendered calls, and where it comes from."""
        if not self.answer:
            return None, "none"
        for format in CALL_FORMATS:
            if self.parses_back(format, reasoning):
                return format, "table"
        inferred = infer_format(self.answer, self.called)
        if inferred is not None and self.parses_back(inferred, reasoning):
            return inferred, "template"
        return None, "none"

    def _given_calls(self, reasoning: Reasoning | None) -> AnyCallFormat | None:
        """Return the format of the response template, with the white space that models write.

        The response template does not say it: the table or the rendered calls do.
        """
        given = self._given.calls
        if not isinstance(given, CallFormat):
            return given
        for format in CALL_FORMATS:
            if isinstance(format, CallFormat) and _has_marks_of(format, given):
                return format
        spaced = with_white_space(given, self.answer)
        return spaced if self.parses_back(spaced, reasoning) else given

    def _is_format_named(self, format: AnyCallFormat) -> bool:
        """Return whether the template has all marks of a format, perhaps in its instructions."""
        if format.is_bare:
            return False
        marks = [mark for mark in key_marks(format) if mark]
        return all(mark in self._template or mark in self._tokens for mark in marks)

    def parses_back(self, format: AnyCallFormat, reasoning: Reasoning | None) -> bool:
        """Return whether the format reads the rendered calls."""
        if not self.answer:
            return False
        syntax = self.syntax(format, reasoning)
        return called_in(syntax, self.answer) == self.called

    def syntax(self, format: AnyCallFormat | None, reasoning: Reasoning | None) -> Syntax:
        other = self._given.other
        texts = BETWEEN.join(literals(format, reasoning, other))
        used = {
            token: token_id
            for token, token_id in self._tokens.items()
            if token in texts and is_markup(token)
        }
        others = self._others if format is not None else None
        return make_syntax(format, reasoning, Marks(used, self._special, others), other)


def key_marks(format: AnyCallFormat) -> list[str]:
    """Return the marks that tell a format from others."""
    if isinstance(format, ChannelFormat):
        return [format.channel, format.message]
    marks = [format.section_open.strip(), format.open.strip()]
    match format.body:
        case NamedCall(separator=separator):
            marks.append(separator.strip())
        case TaggedCall(key_open=key_open):
            marks.append(key_open.strip())
    return marks


def _has_marks_of(format: CallFormat, given: CallFormat) -> bool:
    """Return whether a format has the notation of another one and all of its marks."""
    match format.body, given.body:
        case JsonCall() as body, JsonCall() as other:
            if replace(body, id=None) != other:
                return False
        case body, other if type(body) is not type(other):
            return False
    marks = {text.strip() for text in literals(format, None)}
    return {text.strip() for text in literals(given, None)} <= marks


def is_markup(token: str) -> bool:
    """Return whether an added token is a mark rather than a run of spaces or a word."""
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


def parsed(syntax: Syntax, text: str, *, start: State = State.CONTENT) -> list[Delta]:
    """Return the events of a whole rendered answer."""
    parser = AnswerParser(syntax, PROBES, start=start)
    parser.push(syntax.marks.encode(text))
    parser.flush(is_cut=False)
    return parser.take()


def called_in(syntax: Syntax, text: str) -> list[tuple[str, Any]]:
    """Return the names and arguments of all calls in a rendered answer."""
    calls: list[tuple[str, Any]] = []
    for delta in parsed(syntax, text):
        match delta:
            case ToolCallDelta(name=str(name), arguments=arguments):
                try:
                    calls.append((name, json.loads(arguments)))
                except ValueError:
                    calls.append((name, arguments))
            case ContentDelta() | ReasoningDelta() | ToolCallDelta():
                pass
    return calls


def _calls(called: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(CALL_IDS, called, strict=False)
    ]
