"""Parsing: how the answers of one request are split into content, reasoning and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import structlog

from server.generation.chat_prompt import Chat, shows_tools_in_text
from server.generation.grammar import JSON_OPTIONS, WantedGrammar
from server.generation.options import GenerationOptions
from server.http.errors import invalid
from server.state import AppState
from server.text.chat_template import ChatTemplate
from server.text.parsers.call_grammar import call_grammar, reasoning_grammar
from server.text.parsers.detect import AnswerFormat, Prober, detect
from server.text.parsers.formats import BY_NAME, REASONING_BY_NAME, Reasoning
from server.text.parsers.response_template import translated
from server.text.parsers.syntax import State, Syntax
from server.text.parsers.tools import Tool
from server.text.tokenizer import Tokenizer

log = structlog.get_logger("server.formats")


@dataclass(frozen=True)
class Parsing:
    """The ingredients of the parsers of a request's choices."""

    syntax: Syntax
    start: State
    tools: Mapping[str, Tool]
    most_calls: int  # the answer ends with the last of them


def parsing_of(state: AppState, chat: Chat, prompt: str) -> Parsing | None:
    """Return how to parse the answers to a prompt; None if they are plain text.

    Raises a 400 ApiError if `tool_choice` needs tools that the request lacks.
    """
    use = chat.tool_use
    check_tool_choice(chat)
    answers = _format_of(state, chat)
    if answers is None:
        return None
    has_tools = bool(use.tools) and use.mode != "none"
    syntax = answers.syntax if has_tools else answers.plain_syntax
    if syntax.is_plain:
        return None
    return Parsing(
        syntax=syntax,
        start=answers.start(prompt),
        tools={tool.name: tool for tool in use.tools},
        most_calls=use.most_calls,
    )


def check_tool_choice(chat: Chat) -> None:
    """Raise a 400 ApiError if `tool_choice` needs tools that the request lacks."""
    use = chat.tool_use
    if use.mode == "required" and not use.tools:
        raise invalid(use.choice_param, f"{use.choice_param} needs tools, and there are none.")
    if use.name is not None and use.name not in {tool.name for tool in use.tools}:
        message = f"{use.choice_param} names {use.name[:64]!r}, which is not among the tools."
        raise invalid(use.choice_param, message)


def _format_of(state: AppState, chat: Chat) -> AnswerFormat | None:
    if shows_tools_in_text(state, chat) or (state.answers and state.answers.calls is None):
        return state.hermes
    return state.answers


def with_grammar(
    state: AppState, options: GenerationOptions, chat: Chat, parsing: Parsing | None
) -> GenerationOptions:
    """Return the options with the grammar that tools, reasoning and structured output need.

    Raises a 400 ApiError if the parameters of a tool cannot be followed.
    """
    answers = _format_of(state, chat)
    if parsing is None or answers is None:
        return options
    use, wanted = chat.tool_use, options.grammar
    is_held = any(tool.is_strict for tool in use.tools) or wanted is not None
    if use.tools and use.mode != "none" and (use.mode == "required" or is_held):
        is_alternative = wanted is not None and use.mode == "auto"
        other = "@answer" if is_alternative else ""
        try:
            text = call_grammar(answers, use, parsing.start, JSON_OPTIONS, other=other)
        except ValueError as error:
            raise invalid(use.param, f"{use.param} cannot be followed: {error}.") from None
        grammar = WantedGrammar(use.param, "lark", text)
        if wanted is not None and is_alternative:
            grammar = dataclasses.replace(wanted, around=text)
        return dataclasses.replace(options, grammar=grammar)
    if wanted is None:
        return options
    around = reasoning_grammar(answers, parsing.start, JSON_OPTIONS)
    return dataclasses.replace(options, grammar=dataclasses.replace(wanted, around=around))


def answer_formats(
    tokenizer: Tokenizer, template: ChatTemplate | None, calls_name: str, reasoning_name: str
) -> tuple[AnswerFormat | None, AnswerFormat | None]:
    """Return the format of a model's answers, and the one for tools in the system message.

    The names are of formats, or "auto".
    """
    if template is None:
        return None, None
    reasoning: Reasoning | Literal["auto"] | None = REASONING_BY_NAME.get(reasoning_name)
    if reasoning_name == "auto":
        reasoning = "auto"
    calls = None if calls_name == "auto" else BY_NAME[calls_name]
    prober = Prober(
        template.render,
        template.sources,
        tokenizer.added_ids,
        tokenizer.special_ids,
        translated(tokenizer.response_template),
        tokenizer.eos_token_ids,
    )
    found = detect(prober, calls=calls, reasoning=reasoning)
    for problem in prober.problems:
        log.warning("response_template is not used in full", problem=problem)
    hermes = detect(prober, calls=calls or BY_NAME["hermes"], reasoning=found.reasoning)
    return found, hermes
