"""The rules of arguments that are not one JSON object: between tags, in Python's and Gemma's calls.

A value that a rule allows is read back as a value that the schema allows (`values.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from server.text import exact_json
from server.text.parsers.allowed import Allowed, allowed_values, properties_of, required_names
from server.text.parsers.formats import TaggedCall
from server.text.parsers.rules import GrammarRules
from server.text.parsers.text_rules import ANY, texts_of
from server.text.tools import Tool

PYTHON_TEXT = r"/'([^'\\\n]|\\[\\'\"nrt])*'/"
QUOTE, PLAIN_TEXT = '"\'"', r"/[^'\\\n]*/"
PYTHON_NAMES = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}
SCALARS = ("null", "boolean", "integer", "number")
COLLECTIONS = {"object": "gemma_object", "array": "gemma_array"}
# Texts that begin so are read as JSON, if the schema says more of such values than their type.
COLLECTION = r"\s*[\[{](?s:.*)"
FIGURE = r"\s*-?[0-9](?s:.*)"
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Texts that are read as values of other types.
WORDS = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/",
}
NO_SPACE_AT_ENDS = r"/(?s:.*)/ & ~/\s(?s:.*)/ & ~/(?s:.*)\s/"

Schema = dict[str, Any]


def tagged_arguments(
    rules: GrammarRules, body: TaggedCall, tool: Tool, *, is_stripped: bool = False
) -> str:
    """Return the arguments between tags, in the order of the schema.

    With `is_stripped`, white space at the ends is no part of a text.
    """
    properties, required = _properties(tool)
    parts = [rules.literal(tool.name + body.name_end)]
    for key, schema in properties.items():
        allowed = allowed_values(schema, tool.parameters)
        is_text = set(allowed) == {"string"}
        key_close = body.key_close if is_text or not body.json_key_close else body.json_key_close
        opening = rules.literal(f"{body.key_open}{key}{key_close}{body.value_open}")
        is_json = bool(body.json_key_close) and not is_text
        if is_json:
            value = f"{rules.json(schema)} {rules.literal(body.value_close)}"
        else:
            texts = texts_of(schema, tool.parameters)
            if texts and is_stripped:
                texts = f"{texts} & {NO_SPACE_AT_ENDS}"
            value = _tagged_value(rules, schema, allowed, texts, body.value_close)
        parts.append(f"({opening} {value}){'' if key in required else '?'}")
    return " ".join(parts)


def _tagged_value(
    rules: GrammarRules, schema: Schema, allowed: Allowed, texts: str, closing: str
) -> str:
    """Return a value and the mark after it. `texts` are those that the schema allows."""
    listed = allowed.get("string", ())
    others = allowed.keys() - {"string"}
    if listed is None:
        mark = closing.strip()
        excluded = [mark] if mark and not rules.is_token(mark) else []
        patterns = _read_as_json(schema, allowed)
        if texts:
            texts = any_of([texts, *(word for kind, word in WORDS.items() if kind in others)])
        text = rules.until(closing, *excluded, pattern="|".join(patterns), texts=texts)
        if not patterns:
            return text
        json_schema = {**schema, "type": sorted(others)}
        return f"({rules.json(json_schema)} {rules.literal(closing)} | {text})"
    values = [rules.literal(text) for text in listed]
    if others or not listed:
        values.append(rules.json(schema))
    return f"({any_of(values)}) {rules.literal(closing)}"


def _read_as_json(schema: Schema, allowed: Allowed) -> list[str]:
    """Return the patterns of texts that must be JSON, because the schema says what it may be."""
    patterns = []
    if schema and not {"object", "array"}.isdisjoint(allowed):
        patterns.append(COLLECTION)
    numbers = [allowed[kind] for kind in ("integer", "number") if kind in allowed]
    written = exact_json.text(schema) if numbers else ""
    if any(numbers) or any(f'"{limit}"' in written for limit in LIMITS):
        patterns.append(FIGURE)
    return patterns


def python_arguments(rules: GrammarRules, tool: Tool) -> str:
    """Return the arguments of a call like f(a=1)."""
    return _pairs(rules, tool, ", ", lambda key, schema: _python_pair(rules, key, schema, tool))


def gemma_arguments(rules: GrammarRules, tool: Tool, quote: str) -> str:
    """Return the arguments of a call like f{a:1}."""
    _define_gemma(rules, quote)
    return _pairs(
        rules, tool, ",", lambda key, schema: _gemma_pair(rules, key, schema, tool, quote)
    )


def _properties(tool: Tool) -> tuple[dict[str, Schema], set[str]]:
    """Return the schemas of the arguments by name, and the names of the required ones."""
    root = tool.parameters
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    schemas: dict[str, Schema] = {}
    for key, schema in properties_of(root).items():
        if not isinstance(schema, dict):
            schemas[key] = {"enum": []} if schema is False else {}
        else:
            schemas[key] = schema | definitions if schema else {}
    return schemas, set(required_names(root))


def _pairs(
    rules: GrammarRules, tool: Tool, separator: str, pair: Callable[[str, Schema], str]
) -> str:
    """Return the arguments in the order of the schema; optional ones may be left out."""
    properties, required = _properties(tool)
    tail_first, tail_next = '""', '""'  # the rest, after no argument and after another
    for key, schema in reversed(properties.items()):
        one = rules.add("pair", pair(key, schema))
        after = f"{one} {tail_next}"
        following = f"{json.dumps(separator)} {after}"
        if key in required:
            tail_first, tail_next = rules.add("rest", after), rules.add("rest", following)
        else:
            tail_first = rules.add("rest", f"{after} | {tail_first}")
            tail_next = rules.add("rest", f"{following} | {tail_next}")
    return tail_first


def _python_pair(rules: GrammarRules, key: str, schema: Schema, tool: Tool) -> str:
    allowed = allowed_values(schema, tool.parameters)
    texts = allowed.get("string", ())
    values = [json.dumps(repr(text)) for text in texts or ()]
    if texts is None:
        held = texts_of(schema, tool.parameters)
        values.append(rules.add("TEXT", _quoted(held)) if held else PYTHON_TEXT)
    for kind, names in PYTHON_NAMES.items():
        if kind in allowed and allowed[kind] is None:
            values += names
    is_named = all(allowed[kind] is None for kind in PYTHON_NAMES.keys() & allowed.keys())
    if texts is None or not is_named or not values or allowed.keys() - {"string", *PYTHON_NAMES}:
        values.append(rules.json(schema))
    return f"{json.dumps(f'{key}=')} ({any_of(values)})"


def _quoted(texts: str) -> str:
    """Return those of the texts that need no escape, in Python's quotes. JSON has the others."""
    return f"{QUOTE} (({texts}) & {PLAIN_TEXT}) {QUOTE}"


def _gemma_pair(rules: GrammarRules, key: str, schema: Schema, tool: Tool, quote: str) -> str:
    allowed = allowed_values(schema, tool.parameters)
    values = []
    if "string" in allowed:
        held = texts_of(schema, tool.parameters)
        values.append(_gemma_text(rules, allowed["string"], quote, held))
    scalars = [kind for kind in SCALARS if kind in allowed]
    if scalars or not allowed:  # the compiler refuses a schema that allows nothing
        is_whole = allowed.keys() <= set(SCALARS)
        values.append(rules.json(schema if is_whole else _scalar_schema(allowed, scalars)))
    values += [rule for kind, rule in COLLECTIONS.items() if kind in allowed]
    return f"{json.dumps(f'{key}:')} ({any_of(values)})"


def _gemma_text(
    rules: GrammarRules, texts: tuple[Any, ...] | None, quote: str, held: str = ANY
) -> str:
    mark = rules.literal(quote)
    if texts is None:
        return f"{mark} {rules.until(quote, texts=held)}"
    return f"{mark} ({any_of(map(json.dumps, texts))}) {mark}"


def _scalar_schema(allowed: Allowed, scalars: Iterable[str]) -> Schema:
    options: list[Schema] = []
    for kind in scalars:
        values = allowed[kind]
        options.append({"type": kind} if values is None else {"enum": list(values)})
    return {"anyOf": options}


def _define_gemma(rules: GrammarRules, quote: str) -> None:
    """Add the rules of any value in Gemma's notation."""
    scalar = rules.json({"type": ["number", "boolean", "null"]})
    pair = '/[A-Za-z_][A-Za-z0-9_]*/ ":" gemma'
    rules.define("gemma_object", f'"{{" ({pair} ("," {pair})*)? "}}"')
    rules.define("gemma_array", '"[" (gemma ("," gemma)*)? "]"')
    text = _gemma_text(rules, None, quote)
    rules.define("gemma", f"{text} | {scalar} | {any_of(COLLECTIONS.values())}")


def any_of(rules: Iterable[str]) -> str:
    """Return a rule that one of several alternatives fulfils."""
    return " | ".join(rules)
