"""JSON schemas whose objects have only the members that they describe.

A schema that lists properties also allows others, unless it has `additionalProperties`. A model
could then add members without end, and a function gets arguments that it does not know. Answers
that have fewer members are still valid.
"""

from __future__ import annotations

from typing import Any

# An object is described in one place, unless its schema has one of these.
COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "patternProperties")
# With one of these anywhere, two schemas may describe the same object.
OVERLAPPING = ("allOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties")
# Members of a schema that contain schemas: one, a list, or by name.
NESTED = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems")
LISTED = ("prefixItems", "items", "anyOf", "oneOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without free members, or the same one if that could forbid every answer."""
    nodes = _schemas_in(schema)
    for node in nodes:
        is_combined = "properties" in node and any(name in node for name in COMBINING)
        if is_combined or any(name in node for name in OVERLAPPING):
            return schema
    if not any(map(_is_open, nodes)):
        return schema
    try:
        closed_schema: dict[str, Any] = _copied(schema)
    except RecursionError:
        return schema  # too deep for the library, too
    for node in _schemas_in(closed_schema):
        if _is_open(node):
            node["additionalProperties"] = False
    return closed_schema


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


def _schemas_in(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema and all schemas within it."""
    found: list[dict[str, Any]] = []
    unread: list[Any] = [schema]
    while unread:
        node = unread.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        unread += [node.get(name) for name in NESTED]
        for name in LISTED:
            members = node.get(name)
            unread += members if isinstance(members, list) else []
        for name in NAMED:
            members = node.get(name)
            unread += members.values() if isinstance(members, dict) else []
    return found


def _copied(value: Any) -> Any:
    """Return a deep copy of a JSON value. Raises RecursionError for a very deep one."""
    if isinstance(value, dict):
        return {name: _copied(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_copied(member) for member in value]
    return value
