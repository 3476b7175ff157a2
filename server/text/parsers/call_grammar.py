"""The grammar of an answer with tool calls, in the model's own format.

Its rules are those of `GrammarRules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.text.parsers.allowed import allowed_values, properties_of
from server.text.parsers.argument_grammar import (
    any_of,
    gemma_arguments,
    python_arguments,
    tagged_arguments,
)
from server.text.parsers.detect import AnswerFormat
from server.text.parsers.formats import (
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from server.text.parsers.input_grammar import held_call, held_message, named_opening
from server.text.parsers.rules import NUMBER, GrammarRules, escaped
from server.text.parsers.syntax import State
from server.text.tools import Tool, ToolUse

ANY_OBJECT = {"type": "object"}


def reasoning_grammar(answers: AnswerFormat, start: State, json_options: Mapping[str, Any]) -> str:
    """Return the grammar of the reasoning and the rule `@answer` after it; "" without reasoning."""
    rules = GrammarRules(answers.plain_syntax.marks, json_options)
    prefix = _reasoning(rules, answers, start)
    if isinstance(answers.calls, ChannelFormat):
        final = f"{answers.calls.channel}final{answers.calls.message}"
        prefix += f" {rules.literal(final)}"
    return rules.text(f"{prefix} @answer") if prefix.strip() else ""


def call_grammar(
    answers: AnswerFormat,
    use: ToolUse,
    start: State,
    json_options: Mapping[str, Any],
    *,
    other: str = "",
) -> str:
    """Return the grammar of an answer that calls tools, or may call them if `mode` is "auto".

    `answers.calls` must be known. `other` is the rule of an answer without calls; "": any text.
    """
    rules = GrammarRules(answers.syntax.marks, json_options, is_bounded=True)
    tools = [tool for tool in use.tools if use.name in (None, tool.name)]
    if use.mode == "auto" and any(tool.input_is_held for tool in tools):
        tools = [tool if tool.is_strict else _free(tool) for tool in tools]
    prefix = _reasoning(rules, answers, start)
    most = use.most_calls
    if isinstance(answers.calls, ChannelFormat):
        calls = _channel_calls(rules, answers.calls, tools)
        if use.mode == "auto":
            final = rules.literal(f"{answers.calls.channel}final{answers.calls.message}")
            calls = f"({calls} | {final} {other or rules.any_text()})"
        return rules.text(f"{prefix} {calls}")
    assert answers.calls is not None
    calls = _calls(rules, answers.calls, tools, most)
    if use.mode == "auto":
        calls = _free_or_calls(rules, answers.calls, tools, most, other)
    return rules.text(f"{prefix} {calls}")


def _free(tool: Tool) -> Tool:
    """Return a function whose arguments may have any values of their types.

    A function that is not strict is only in this grammar because a custom tool needs one. So its
    schema must not be the cause of a refusal.
    """
    properties = {}
    for name, schema in properties_of(tool.parameters).items():
        kinds = list(allowed_values(schema, tool.parameters))
        properties[name] = {"type": kinds} if kinds else {}
    free = {**ANY_OBJECT, "properties": properties, "additionalProperties": True}
    return replace(tool, parameters=free)


def _free_or_calls(
    rules: GrammarRules, format: CallFormat, tools: Sequence[Tool], most: int, other: str
) -> str:
    """Return the calls, or an answer without them; text may precede calls that have a mark."""
    opening = format.section_open.strip() or format.open.strip()
    if other or not opening:
        is_json_list = isinstance(format.body, JsonCall) and format.body.is_list
        pattern = "" if is_json_list else _beginning(format, tools)
        text = other or rules.text_without(pattern=pattern)
        return f"({_calls(rules, format, tools, most)} | {text})"
    if rules.is_token(opening):
        return f"{rules.any_text()}? ({_calls(rules, format, tools, most)})?"
    calls = _calls(rules, format, tools, most, opened=opening)
    return f"({rules.text_without(opening)} | {rules.until(opening)} {calls})?"


def _beginning(format: CallFormat, tools: Sequence[Tool]) -> str:
    """Return the pattern of texts that begin with a call of one of the tools."""
    names = "|".join(escaped(tool.name) for tool in tools)
    opening = rf"\[\s*({names})\s*\("
    if isinstance(format.body, JsonCall):
        key = escaped(json.dumps(format.body.name))
        opening = rf"\{{\s*{key}\s*:\s*\"({names})\""
    return rf"\s*{opening}(?s:.*)"


def _reasoning(rules: GrammarRules, answers: AnswerFormat, start: State) -> str:
    if isinstance(answers.calls, ChannelFormat):
        return _channel_reasoning(rules, answers.calls)
    if answers.reasoning is None:
        return ""
    closing = answers.reasoning.close.strip()
    rest = f"{rules.until(closing)} /[\\n ]{{0,4}}/"
    if start is State.REASONING:
        return rest
    if answers.is_opened_on_request:
        return ""
    return f"({rules.literal(answers.reasoning.open.strip())} {rest})?"


def _channel_reasoning(rules: GrammarRules, format: ChannelFormat) -> str:
    opening = rules.literal(f"{format.channel}analysis{format.message}")
    closing = rules.literal(f"{format.end}{format.start}assistant")
    return f"({opening} {rules.any_text()} {closing})?"


def _channel_calls(rules: GrammarRules, format: ChannelFormat, tools: Sequence[Tool]) -> str:
    calls = []
    for tool in tools:
        if tool.input_is_held:
            calls.append(rules.add("call", held_message(rules, format, tool)))
            continue
        header = f"{format.channel}commentary to=functions.{tool.name} {format.constrain}json"
        opening = rules.literal(header + format.message)
        calls.append(rules.add("call", f"{opening} {rules.json(_schema(tool))}"))
    return f"({any_of(calls)})"


def _calls(
    rules: GrammarRules, format: CallFormat, tools: Sequence[Tool], most: int, *, opened: str = ""
) -> str:
    """Return one call or more, with the marks around them. `opened` is a mark already written.

    A call whose input a grammar holds is alone.
    """
    held = [held_call(rules, format, tool, opened) for tool in tools if tool.input_is_held]
    plain = [tool for tool in tools if not tool.input_is_held]
    if held:
        several = [_calls(rules, format, plain, most, opened=opened)] if plain else []
        return f"({any_of([*several, *held])})"
    call = rules.add("call", any_of([_call(rules, format, tool, format.open) for tool in tools]))
    first = call
    section_open = format.section_open
    if section_open:
        section_open = _after(section_open, opened)
    elif opened:
        rest = _after(format.open, opened)
        first = rules.add("call", any_of([_call(rules, format, tool, rest) for tool in tools]))
    is_python = isinstance(format.body, PythonCall)
    is_list = is_python or (isinstance(format.body, JsonCall) and format.body.is_list)
    separator = json.dumps(", ") if is_list else rules.literal(format.separator)
    if is_python:
        first = rules.add("call", any_of([_call(rules, format, tool, "[") for tool in tools]))
    elif is_list:
        first = f'"[" {first}'
    calls = first if most == 1 else f"{first} ({separator} {call}){{0,{most - 1}}}"
    if is_list:
        calls = f'{calls} "]"'
    return f"{rules.literal(section_open)} {calls} {rules.literal(format.section_close)}"


def _after(text: str, opened: str) -> str:
    """Return what follows a mark that is already written."""
    return text.lstrip().removeprefix(opened) if opened else text


def _call(rules: GrammarRules, format: CallFormat, tool: Tool, opening: str) -> str:
    match format.body:
        case JsonCall() as body:
            inside = _json_call(rules, body, tool, is_bare=format.is_bare)
        case NamedCall() as body:
            inside = _named_call(rules, body, tool)
        case TaggedCall() as body:
            inside = tagged_arguments(rules, body, tool)
        case LinesCall(name_end=name_end, key_end=key_end, line_end=line_end):
            tagged = TaggedCall(name_end, "", f"{key_end} ", line_end)
            inside = tagged_arguments(rules, tagged, tool, is_stripped=True)
        case PythonCall():
            pairs = python_arguments(rules, tool)
            # One literal: other text may begin with the bracket alone.
            begin = rules.literal(f"{opening}{tool.name}(")
            return f'{begin} {pairs} ")" {rules.literal(format.close)}'
        case GemmaCall(quote=quote):
            pairs = gemma_arguments(rules, tool, quote)
            inside = f'{json.dumps(tool.name + "{")} {pairs} "}}"'
    return f"{rules.literal(opening)} {inside} {rules.literal(format.close)}"


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of the arguments: an object, without others unless it allows them."""
    schema = {**tool.parameters, **ANY_OBJECT}
    if schema.get("properties"):
        schema.setdefault("additionalProperties", False)
    return schema


def _json_call(rules: GrammarRules, body: JsonCall, tool: Tool, *, is_bare: bool) -> str:
    """Return a call. Without marks, other text may not begin like one: compact JSON is a call."""
    arguments = rules.json(_schema(tool))
    if not body.name:
        return f'{json.dumps("{" + json.dumps(tool.name) + ": ")} {arguments} "}}"'
    name = f"{json.dumps(body.name)}: {json.dumps(tool.name)}, {json.dumps(body.arguments)}: "
    if body.id is None:
        compact = name.replace('": ', '":').replace('", ', '",')
        openings = [name, compact] if is_bare else [name]
        opening = any_of(json.dumps("{" + written) for written in openings)
        return f'({opening}) {arguments} "}}"'
    opening = "{" + json.dumps(body.id) + ': "'
    return f'{json.dumps(opening)} {NUMBER} {json.dumps(chr(34) + ", " + name)} {arguments} "}}"'


def _named_call(rules: GrammarRules, body: NamedCall, tool: Tool) -> str:
    return f"{named_opening(rules, body, tool)} {rules.json(_schema(tool))}"
