"""The grammar of an answer with tool calls, in the model's own format.

Its rules are those of `GrammarRules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.text.parsers.calls import kind_of_schema, required_names
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
from server.text.parsers.rules import GrammarRules
from server.text.parsers.syntax import State
from server.text.parsers.tools import Tool, ToolUse

NUMBER = "/[0-9]{1,3}/"
PYTHON_TEXT = r"/'([^'\\\n]|\\[\\'\"nrt])*'/"
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


def _free_or_calls(
    rules: GrammarRules, format: CallFormat, tools: Sequence[Tool], most: int, other: str
) -> str:
    """Return the calls, or an answer without them; text may precede calls that have a mark."""
    opening = format.section_open.strip() or format.open.strip()
    if other or not opening:
        return f"({_calls(rules, format, tools, most)} | {other or rules.any_text()})"
    if rules.is_token(opening):
        return f"{rules.any_text()}? ({_calls(rules, format, tools, most)})?"
    calls = _calls(rules, format, tools, most, opened=opening)
    return f"({rules.text_without(opening)} | {rules.until(opening)} {calls})?"


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
        header = f"{format.channel}commentary to=functions.{tool.name} {format.constrain}json"
        opening = rules.literal(header + format.message)
        calls.append(rules.add("call", f"{opening} {rules.json(_schema(tool))}"))
    return _any(calls)


def _calls(
    rules: GrammarRules, format: CallFormat, tools: Sequence[Tool], most: int, *, opened: str = ""
) -> str:
    """Return one call or more, with the marks around them. `opened` is a mark already written."""
    call = rules.add("call", _any([_call(rules, format, tool, format.open) for tool in tools]))
    first = call
    section_open = format.section_open
    if section_open:
        section_open = _after(section_open, opened)
    elif opened:
        rest = _after(format.open, opened)
        first = rules.add("call", _any([_call(rules, format, tool, rest) for tool in tools]))
    is_list = isinstance(format.body, PythonCall)
    is_list |= isinstance(format.body, JsonCall) and format.body.is_list
    separator = json.dumps(", ") if is_list else rules.literal(format.separator)
    calls = first if most == 1 else f"{first} ({separator} {call}){{0,{most - 1}}}"
    if is_list:
        calls = f'"[" {calls} "]"'
    return f"{rules.literal(section_open)} {calls} {rules.literal(format.section_close)}"


def _after(text: str, opened: str) -> str:
    """Return what follows a mark that is already written."""
    return text.lstrip().removeprefix(opened) if opened else text


def _call(rules: GrammarRules, format: CallFormat, tool: Tool, opening: str) -> str:
    match format.body:
        case JsonCall() as body:
            inside = _json_call(rules, body, tool)
        case NamedCall() as body:
            inside = _named_call(rules, body, tool)
        case TaggedCall() as body:
            inside = _tagged_call(rules, body, tool)
        case LinesCall(name_end=name_end, key_end=key_end, line_end=line_end):
            tagged = TaggedCall(name_end, "", f"{key_end} ", line_end)
            inside = _tagged_call(rules, tagged, tool)
        case PythonCall():
            pairs = _pairs(rules, tool, ", ", lambda key, schema: _python_pair(rules, key, schema))
            inside = f'{json.dumps(tool.name + "(")} {pairs} ")"'
        case GemmaCall(quote=quote):
            value = _gemma_value(rules, quote)
            pairs = _pairs(
                rules, tool, ",", lambda key, schema: _gemma_pair(rules, key, schema, quote, value)
            )
            inside = f'{json.dumps(tool.name + "{")} {pairs} "}}"'
    return f"{rules.literal(opening)} {inside} {rules.literal(format.close)}"


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of the arguments: an object, without others unless it allows them."""
    schema = {**tool.parameters, **ANY_OBJECT}
    if schema.get("properties"):
        schema.setdefault("additionalProperties", False)
    return schema


def _json_call(rules: GrammarRules, body: JsonCall, tool: Tool) -> str:
    arguments = rules.json(_schema(tool))
    if not body.name:
        return f'{json.dumps("{" + json.dumps(tool.name) + ": ")} {arguments} "}}"'
    name = f"{json.dumps(body.name)}: {json.dumps(tool.name)}, {json.dumps(body.arguments)}: "
    if body.id is None:
        return f'{json.dumps("{" + name)} {arguments} "}}"'
    opening = "{" + json.dumps(body.id) + ': "'
    return f'{json.dumps(opening)} {NUMBER} {json.dumps(chr(34) + ", " + name)} {arguments} "}}"'


def _named_call(rules: GrammarRules, body: NamedCall, tool: Tool) -> str:
    written = body.written.replace("{name}", tool.name)
    before, found, after = written.partition("{index}")
    name = rules.literal(before)
    if found:
        name = f"{name} {NUMBER} {rules.literal(after)}"
    return f"{name} {rules.literal(body.separator)} {rules.json(_schema(tool))}"


def _tagged_call(rules: GrammarRules, body: TaggedCall, tool: Tool) -> str:
    properties, required = _properties(tool)
    parts = [rules.literal(tool.name + body.name_end)]
    for key, schema in properties.items():
        is_text = kind_of_schema(schema) == "text"
        key_close = body.key_close if is_text or not body.json_key_close else body.json_key_close
        opening = rules.literal(f"{body.key_open}{key}{key_close}{body.value_open}")
        closing = body.value_close
        choices = _choices(schema)
        if is_text and choices:
            value = f"({_any(map(rules.literal, choices))}) {rules.literal(closing)}"
        elif is_text and choices is None:
            value = rules.until(closing)
        else:
            value = f"{rules.json(_with_definitions(schema, tool))} {rules.literal(closing)}"
        parts.append(f"({opening} {value}){'' if key in required else '?'}")
    return " ".join(parts)


def _properties(tool: Tool) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Return the schemas of the arguments by name, and the names of the required ones."""
    given = tool.parameters.get("properties")
    properties = given if isinstance(given, dict) else {}
    schemas = {k: v if isinstance(v, dict) else {} for k, v in properties.items()}
    return schemas, set(required_names(tool.parameters))


def _choices(schema: dict[str, Any]) -> list[str] | None:
    """Return the texts that a text argument may be; None if it may be any.

    Without texts the list is empty. The compiler of JSON schemas then refuses the schema.
    """
    if "enum" not in schema:
        return None
    choices = schema["enum"]
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, str)]


def _with_definitions(schema: dict[str, Any], tool: Tool) -> dict[str, Any]:
    names = [name for name in ("$defs", "definitions") if name in tool.parameters]
    return schema | {name: tool.parameters[name] for name in names}


def _pairs(rules: GrammarRules, tool: Tool, separator: str, pair: Any) -> str:
    """Return the arguments in the order of the schema; optional ones may be left out."""
    properties, required = _properties(tool)
    tail_first, tail_next = '""', '""'  # the rest, after no argument and after another
    for key, schema in reversed(properties.items()):
        one = rules.add("pair", pair(key, _with_definitions(schema, tool)))
        after = f"{one} {tail_next}"
        following = f"{json.dumps(separator)} {after}"
        if key in required:
            tail_first, tail_next = rules.add("rest", after), rules.add("rest", following)
        else:
            tail_first = rules.add("rest", f"{after} | {tail_first}")
            tail_next = rules.add("rest", f"{following} | {tail_next}")
    return tail_first


def _python_pair(rules: GrammarRules, key: str, schema: dict[str, Any]) -> str:
    name = json.dumps(f"{key}=")
    if schema.get("type") == "boolean":
        return f'{name} ("True" | "False")'
    choices = _choices(schema)
    if kind_of_schema(schema) == "text" and choices:
        quoted = [json.dumps(repr(choice)) for choice in choices]
        return f"{name} ({_any(quoted)})"
    if kind_of_schema(schema) == "text" and choices is None:
        return f"{name} ({PYTHON_TEXT} | {rules.json(schema)})"
    return f"{name} {rules.json(schema)}"


def _gemma_pair(
    rules: GrammarRules, key: str, schema: dict[str, Any], quote: str, any_value: str
) -> str:
    name = json.dumps(f"{key}:")
    choices = _choices(schema)
    if choices == []:
        return f"{name} {rules.json(schema)}"
    if kind_of_schema(schema) == "text":
        mark = rules.literal(quote)
        if choices:
            return f"{name} {mark} ({_any(map(json.dumps, choices))}) {mark}"
        return f"{name} {mark} {rules.until(quote)}"
    if schema.get("type") in ("integer", "number", "boolean", "null"):
        return f"{name} {rules.json(schema)}"
    return f"{name} {any_value}"


def _gemma_value(rules: GrammarRules, quote: str) -> str:
    """Return any value in Gemma's notation."""
    name = "gemma"
    text = f"{rules.literal(quote)} {rules.until(quote)}"
    scalar = rules.json({"type": ["number", "boolean", "null"]})
    pair = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {name}'
    rules.define(
        name,
        f'{text} | {scalar} | "{{" ({pair} ("," {pair})*)? "}}" | "[" ({name} ("," {name})*)? "]"',
    )
    return name


def _any(rules: Iterable[str]) -> str:
    return " | ".join(rules)
