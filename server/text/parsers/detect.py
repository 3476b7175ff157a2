"""Find out how a model writes reasoning and tool calls, from how its chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from server.text.parsers.formats import (
    CALL_FORMATS,
    REASONING,
    REASONING_BY_NAME,
    AnyCallFormat,
    ChannelFormat,
    NamedCall,
    Reasoning,
    TaggedCall,
)
from server.text.parsers.infer import infer_format
from server.text.parsers.marks import Marks
from server.text.parsers.syntax import State, Syntax, literals, make_syntax
from server.text.parsers.tools import Tool

Messages = list[dict[str, Any]]
# Renders messages with template arguments. Raises an exception if the template refuses them.
Render = Callable[..., str]
Source = Literal["flag", "table", "template", "none"]

QUESTION = "What is new?"
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
        if self.reasoning and prompt.rstrip().endswith(self.reasoning.open.strip()):
            return State.REASONING
        return State.CONTENT


def detect(
    render: Render,
    template: str,
    tokens: Mapping[str, int],
    special: frozenset[int],
    *,
    calls: AnyCallFormat | None = None,
    reasoning: Reasoning | Literal["auto"] | None = "auto",
) -> AnswerFormat:
    """Return the format of a template, given its source and the added tokens of its tokenizer.

    `calls` and `reasoning` override what is found; a `reasoning` of None is none.
    """
    prober = Prober(render, template, tokens, special)
    if reasoning == "auto":
        reasoning = prober.find_reasoning()
    found, source, round_trips = prober.find_calls(reasoning)
    if calls is not None:
        found, source, round_trips = calls, "flag", prober.parses_back(calls, reasoning)
    plain = found if isinstance(found, ChannelFormat) else None
    return AnswerFormat(
        calls=found,
        reasoning=reasoning,
        source=source,
        round_trips=round_trips,
        syntax=prober.syntax(found, reasoning),
        plain_syntax=prober.syntax(plain, reasoning),
    )


class Prober:
    """Renders probes with one template, and parses them with formats."""

    def __init__(
        self, render: Render, template: str, tokens: Mapping[str, int], special: frozenset[int]
    ) -> None:
        self._render = render
        self._template = template
        self._tokens = tokens
        self._special = special
        user = {"role": "user", "content": QUESTION}
        self._prompt = self._rendered([user], add_generation_prompt=True) or ""
        self.answer, self.called = self._find_answer(user)

    def _find_answer(self, user: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text of an answer with calls, without what precedes it, and the calls."""
        for count in (2, 1):
            called = CALLED[:count]
            for more in ({"reasoning_content": THOUGHT, "thinking": THOUGHT}, {}):
                message = {"role": "assistant", "content": "", "tool_calls": _calls(called), **more}
                text = self._rendered([user, message], add_generation_prompt=False)
                if text and called[-1][0] in text.rpartition(QUESTION)[2]:
                    return self._after_prompt(text), called
        return "", []

    def _rendered(self, messages: Messages, **arguments: Any) -> str | None:
        tools = [tool.for_template for tool in PROBES.values()]
        try:
            return self._render(messages, tools=tools, **arguments)
        except Exception:  # a template may fail in any way
            return None

    def _after_prompt(self, text: str) -> str:
        """Return what follows the prompt in `text`, or the user's message if it is not there.

        Reasoning that the prompt opens need not be there.
        """
        for reasoning in (None, *REASONING):
            prompt = self._prompt
            if reasoning is not None:
                prompt = prompt.rstrip().removesuffix(reasoning.open.strip())
            if text.startswith(prompt):
                return text[len(prompt) :]
        return text.rpartition(QUESTION)[2]

    # Reasoning

    def find_reasoning(self) -> Reasoning | None:
        tests = (self._is_opened_by_prompt, self._is_rendered, self._is_named, self._is_in_tokens)
        for test in tests:
            for reasoning in REASONING:
                if test(reasoning):
                    return reasoning
        return None

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
        if self.answer:
            for format in CALL_FORMATS:
                if self.parses_back(format, reasoning):
                    return format, "table", True
            inferred = infer_format(self.answer, self.called)
            if inferred is not None and self.parses_back(inferred, reasoning):
                return inferred, "template", True
        for format in CALL_FORMATS:
            if self._is_format_named(format):
                return format, "table", False
        return None, "none", False

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
        texts = literals(format, reasoning)
        used = {
            token: token_id
            for token, token_id in self._tokens.items()
            if is_markup(token) and any(token in text for text in texts)
        }
        return make_syntax(format, reasoning, Marks(used, self._special))


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
