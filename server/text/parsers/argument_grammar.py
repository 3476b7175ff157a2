"""The rules of arguments that are not one JSON object: between tags, in Python's and Gemma's calls.

A value that a rule allows is read back as a value that the schema allows (`values.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from server.text.parsers.allowed import Allowed, allowed_values, properties_of, required_names
from server.text.parsers.formats import TaggedCall
from server.text.parsers.rules import GrammarRules
from server.text.tools import Tool

PYTHON_TEXT = r"/'([^'\\\n]|\\[\\'\"nrt])*'/"
PYTHON_NAMES = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}
SCALARS = ("null", "boolean", "integer", "number")
COLLECTIONS = {"object": "gemma_object", "array": "gemma_array"}
# Texts that begin so are read as JSON, if the schema allows both.
JSON_BEGINNING = r"\s*[\[{](?s:.*)"

Schema = dict[str, Any]


def tagged_arguments(rules: GrammarRules, body: TaggedCall, tool: Tool) -> str:
    """Return the arguments between tags, in the order of the schema."""
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
            value = _tagged_value(rules, schema, allowed, body.value_close)
        parts.append(f"({opening} {value}){'' if key in required else '?'}")
    return " ".join(parts)


def _tagged_value(rules: GrammarRules, schema: Schema, allowed: Allowed, closing: str) -> str:
    """Return a value and the mark after it."""
    texts = allowed.get("string", ())
    others = allowed.keys() - {"string"}
    if texts is None:
        mark = closing.strip()
        excluded = [mark] if mark and not rules.is_token(mark) else []
        if not _has_details(schema, others):
            return rules.until(closing, *excluded)
        text = rules.until(closing, *excluded, pattern=JSON_BEGINNING)
        return f"({rules.json(schema)} {rules.literal(closing)} | {text})"
    values = [rules.literal(text) for text in texts]
    if others or not texts:
        values.append(rules.json(schema))
    return f"({any_of(values)}) {rules.literal(closing)}"


def _has_details(schema: Schema, others: Iterable[str]) -> bool:
    """Return whether a schema may say more of objects and arrays than that they are allowed."""
    return bool(schema) and not {"object", "array"}.isdisjoint(others)


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
    values = [PYTHON_TEXT] if texts is None else [json.dumps(repr(text)) for text in texts]
    for kind, names in PYTHON_NAMES.items():
        if kind in allowed and allowed[kind] is None:
            values += names
    is_named = all(allowed[kind] is None for kind in PYTHON_NAMES.keys() & allowed.keys())
    if texts is None or not is_named or not values or allowed.keys() - {"string", *PYTHON_NAMES}:
        values.append(rules.json(schema))
    return f"{json.dumps(f'{key}=')} ({any_of(values)})"


def _gemma_pair(rules: GrammarRules, key: str, schema: Schema, tool: Tool, quote: str) -> str:
    allowed = allowed_values(schema, tool.parameters)
    values = []
    if "string" in allowed:
        values.append(_gemma_text(rules, allowed["string"], quote))
    scalars = [kind for kind in SCALARS if kind in allowed]
    if scalars or not allowed:  # the compiler refuses a schema that allows nothing
        is_whole = allowed.keys() <= set(SCALARS)
        values.append(rules.json(schema if is_whole else _scalar_schema(allowed, scalars)))
    values += [rule for kind, rule in COLLECTIONS.items() if kind in allowed]
    return f"{json.dumps(f'{key}:')} ({any_of(values)})"


def _gemma_text(rules: GrammarRules, texts: tuple[Any, ...] | None, quote: str) -> str:
    mark = rules.literal(quote)
    if texts is None:
        return f"{mark} {rules.until(quote)}"
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
