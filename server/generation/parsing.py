"""How the answers of one request are parsed, and the grammar that tools and reasoning need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from server.generation.chat_prompt import (
    Chat,
    shows_tools_in_text,
    template_of,
    thinking_of,
)
from server.generation.options import GenerationOptions
from server.generation.thinking import EFFORT
from server.http.errors import invalid
from server.state import AppState
from server.text.answers import Answers, Parsing
from server.text.wanted_grammar import JSON_OPTIONS, WantedGrammar

RAW_BUDGET = "thinking_token_budget"
PROMPT_END = 64  # tokens in which a prompt may open thoughts


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
    template = template_of(state, chat)
    if answers is None or template is None:
        return options
    thinking = thinking_of(state, chat)
    options = dataclasses.replace(
        options,
        grammar=_grammar(answers, chat, prompt, options.grammar),
        thought_budget=thinking.limit(template, chat.arguments),
    )
    param = EFFORT if thinking.budget is None else thinking.budget_param
    return with_limited_thoughts(state, options, prompt, param)


def _grammar(
    answers: Answers, chat: Chat, prompt: str, wanted: WantedGrammar | None
) -> WantedGrammar | None:
    use = chat.tool_use
    is_held = any(tool.is_strict for tool in use.tools) or wanted is not None
    if use.tools and use.mode != "none" and (use.mode == "required" or is_held):
        is_alternative = wanted is not None and use.mode == "auto"
        other = "@answer" if is_alternative else ""
        try:
            text = answers.call_grammar(use, prompt, JSON_OPTIONS, other)
        except ValueError as error:
            raise invalid(use.param, f"{use.param} cannot be followed: {error}.") from None
        if wanted is not None and is_alternative:
            return dataclasses.replace(wanted, around=text)
        return WantedGrammar(use.param, "lark", text)
    if wanted is None:
        return None
    around = answers.reasoning_grammar(prompt, JSON_OPTIONS)
    return dataclasses.replace(wanted, around=around)


def with_raw_thoughts(
    state: AppState, options: GenerationOptions, prompts: Sequence[list[int]]
) -> GenerationOptions:
    """Return the options of prompts without a chat with the limit of the thoughts.

    Raises a 400 ApiError if only some prompts open thoughts, or if the answer follows a grammar,
    which has no room for thoughts.
    """
    if options.thought_budget is None:
        return options
    if options.grammar is not None:
        message = f"{RAW_BUDGET} cannot be combined with {options.grammar.param} here."
        raise invalid(RAW_BUDGET, message)
    decode = state.tokenizer.decode
    ends = [decode(prompt[-PROMPT_END:], skip_special_tokens=False) for prompt in prompts]
    limited = [with_limited_thoughts(state, options, end, RAW_BUDGET) for end in ends]
    if any(one != limited[0] for one in limited):
        raise invalid(RAW_BUDGET, f"{RAW_BUDGET} needs prompts that all open thoughts, or none.")
    return limited[0]


def with_limited_thoughts(
    state: AppState, options: GenerationOptions, prompt: str, param: str
) -> GenerationOptions:
    """Return the options with the limit of the thoughts in their grammar.

    `param` names the field of `thought_budget`. Without effect, `thought_budget` becomes None.
    """
    budget, answers = options.thought_budget, state.answers
    if budget is None or answers is None or answers.limit_thoughts is None:
        return dataclasses.replace(options, thought_budget=None)
    if options.max_tokens is not None and budget >= options.max_tokens:
        return dataclasses.replace(options, thought_budget=None)
    grammar = options.grammar or WantedGrammar(param, "free", None)
    thoughts = answers.limit_thoughts(budget, prompt)
    return dataclasses.replace(options, grammar=dataclasses.replace(grammar, thoughts=thoughts))
