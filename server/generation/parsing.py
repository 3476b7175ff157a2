"""How the answers of one request are parsed, and the grammar that tools and reasoning need."""

from __future__ import annotations

import dataclasses

from server.generation.chat_prompt import Chat, shows_tools_in_text
from server.generation.options import GenerationOptions
from server.http.errors import invalid
from server.state import AppState
from server.text.answers import Answers, Parsing
from server.text.wanted_grammar import JSON_OPTIONS, WantedGrammar


def parsing_of(state: AppState, chat: Chat, prompt: str) -> Parsing | None:
    """Return how to parse the answers to a prompt; None if they are plain text.

    Raises a 400 ApiError if `tool_choice` needs tools that the request lacks.
    """
    check_tool_choice(chat)
    answers = _answers_of(state, chat)
    return None if answers is None else answers.parsing(chat.tool_use, prompt)


def check_tool_choice(chat: Chat) -> None:
    """Raise a 400 ApiError if `tool_choice` needs tools that the request lacks."""
    use = chat.tool_use
    if use.mode == "required" and not use.tools:
        raise invalid(use.choice_param, f"{use.choice_param} needs tools, and there are none.")
    if use.name is not None and use.name not in {tool.name for tool in use.tools}:
        message = f"{use.choice_param} names {use.name[:64]!r}, which is not among the tools."
        raise invalid(use.choice_param, message)


def _answers_of(state: AppState, chat: Chat) -> Answers | None:
    is_unknown = state.answers is not None and state.answers.calls_name is None
    if is_unknown or shows_tools_in_text(state, chat):
        return state.hermes
    return state.answers


def with_grammar(
    state: AppState, options: GenerationOptions, chat: Chat, prompt: str
) -> GenerationOptions:
    """Return the options with the grammar that tools, reasoning and structured output need.

    For answers that are parsed. Raises a 400 ApiError if the parameters of a tool cannot be
    followed.
    """
    answers = _answers_of(state, chat)
    if answers is None:
        return options
    use, wanted = chat.tool_use, options.grammar
    is_held = any(tool.is_strict for tool in use.tools) or wanted is not None
    if use.tools and use.mode != "none" and (use.mode == "required" or is_held):
        is_alternative = wanted is not None and use.mode == "auto"
        other = "@answer" if is_alternative else ""
        try:
            text = answers.call_grammar(use, prompt, JSON_OPTIONS, other)
        except ValueError as error:
            raise invalid(use.param, f"{use.param} cannot be followed: {error}.") from None
        grammar = WantedGrammar(use.param, "lark", text)
        if wanted is not None and is_alternative:
            grammar = dataclasses.replace(wanted, around=text)
        return dataclasses.replace(options, grammar=grammar)
    if wanted is None:
        return options
    around = answers.reasoning_grammar(prompt, JSON_OPTIONS)
    return dataclasses.replace(options, grammar=dataclasses.replace(wanted, around=around))
