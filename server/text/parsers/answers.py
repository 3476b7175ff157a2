"""Make the Answers of a model: find its formats, and parse and constrain its answers with them."""

from __future__ import annotations

from functools import partial
from typing import Literal

import structlog

from server.text.answers import Answers, JsonOptions, Parser, Parsing
from server.text.chat_template import ChatTemplate
from server.text.parsers.answer_parser import AnswerParser
from server.text.parsers.call_grammar import call_grammar, reasoning_grammar
from server.text.parsers.detect import AnswerFormat, Prober, detect
from server.text.parsers.formats import BY_NAME, REASONING_BY_NAME, Reasoning
from server.text.parsers.response_template import translated
from server.text.parsers.thoughts import thought_limiter
from server.text.tokenizer import Tokenizer
from server.text.tools import ToolUse

log = structlog.get_logger("server.formats")


def answers_of(
    tokenizer: Tokenizer, template: ChatTemplate | None, calls_name: str, reasoning_name: str
) -> tuple[Answers | None, Answers | None]:
    """Return how a model answers, and how it does with tools in the system message.

    The names are of formats, or "auto". Both are None without a template.
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
    return _answers(found, tokenizer), _answers(hermes, tokenizer)


def _answers(found: AnswerFormat, tokenizer: Tokenizer) -> Answers:
    return Answers(
        calls_name=None if found.calls is None else found.calls.name,
        reasoning_name=found.reasoning_name,
        reasoning_mark="" if found.reasoning is None else found.reasoning.open.strip(),
        source=found.source,
        round_trips=found.round_trips,
        shows_one_call=found.shows_one_call,
        parsing=partial(_parsing, found),
        call_grammar=partial(_call_grammar, found),
        reasoning_grammar=partial(_reasoning_grammar, found),
        limit_thoughts=thought_limiter(found, tokenizer),
    )


def _parsing(found: AnswerFormat, use: ToolUse, prompt: str) -> Parsing | None:
    has_tools = bool(use.tools) and use.mode != "none"
    syntax = found.syntax if has_tools else found.plain_syntax
    if syntax.is_plain:
        return None
    tools = {tool.name: tool for tool in use.tools}
    start = found.start(prompt)

    def new_parser(shows_special: bool) -> Parser:
        return AnswerParser(
            syntax, tools, start=start, shows_special=shows_special, most_calls=use.most_calls
        )

    return Parsing(syntax.marks, new_parser)


def _call_grammar(
    found: AnswerFormat, use: ToolUse, prompt: str, options: JsonOptions, other: str
) -> str:
    return call_grammar(found, use, found.start(prompt), options, other=other)


def _reasoning_grammar(found: AnswerFormat, prompt: str, options: JsonOptions) -> str:
    return reasoning_grammar(found, found.start(prompt), options)
