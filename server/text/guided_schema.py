"""JSON schemas as llguidance gets them: bounded, with our options, and with closed objects.

A schema that lists properties also allows others, unless it has `additionalProperties`. A model
could then add members without end, and a function gets arguments that it does not know. Answers
that have fewer members are still valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_NAME_PATTERNS = 128  # of one schema; the library compares them with each other
# An object is described in one place, unless its schema has one of these.
COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "patternProperties")
# With one of these anywhere, two schemas may describe the same object.
OVERLAPPING = ("allOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties")
# Members of a schema that contain schemas: by name; and one or a list of them.
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
NESTED = {"items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems"}
CONTAINERS = NAMED | NESTED | {"prefixItems", "anyOf", "oneOf"}


def guided(schema: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance. Its own `x-guidance` options win over `options`.

    Raises ValueError if it has too many patterns in `patternProperties`.
    """
    check_name_patterns(schema)
    own = schema.get("x-guidance")
    return {**closed(schema), "x-guidance": own if isinstance(own, dict) else options}


def check_name_patterns(schema: dict[str, Any]) -> None:
    """Raise ValueError if a schema has too many patterns in its `patternProperties`."""
    found = 0
    unread: list[Any] = [schema]
    while unread:
        node = unread.pop()
        if isinstance(node, list):
            unread.extend(node)
        if not isinstance(node, dict):
            continue
        unread.extend(node.values())
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict):
            found += len(patterns)
    if found > MAX_NAME_PATTERNS:
        raise ValueError(f"{found} patternProperties, and the limit is {MAX_NAME_PATTERNS}")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without free members, or the same one if that could forbid every answer."""
    try:
        copy: dict[str, Any] = orjson.loads(orjson.dumps(schema))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError):
        return schema  # too deep for the library, too
    open_nodes = []
    for node in _schemas_in(copy):
        is_combined = "properties" in node and not node.keys().isdisjoint(COMBINING)
        if is_combined or not node.keys().isdisjoint(OVERLAPPING):
            return schema
        if _is_open(node):
            open_nodes.append(node)
    if not open_nodes:
        return schema
    for node in open_nodes:
        node["additionalProperties"] = False
    return copy


def _is_open(node: dict[str, Any]) -> bool:
    """Return whether a schema lists all members that an object needs, but allows others."""
    properties = node.get("properties")
    if not isinstance(properties, dict) or "additionalProperties" in node:
        return False
    required = node.get("required", [])
    least = node.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int):
        return False  # the library refuses it
    return all(name in properties for name in required) and least <= len(properties)


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    unread: list[Any] = [schema]
    while unread:
        node = unread.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in node.keys() & CONTAINERS:
            members = node[name]
            if name in NAMED:
                members = list(members.values()) if isinstance(members, dict) else []
            unread += members if isinstance(members, list) else [members]
