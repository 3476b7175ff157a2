"""Bounds of the objects that a schema leaves open, so that a forced call comes to an end.

A small model adds members to such an object until its answer is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from server.text.schema_nodes import Node

MOST_MEMBERS = 16  # of an object, beyond those that its schema lists
MOST_OPTIONAL = 32  # listed members; each becomes a pattern, and the library compares them
ANY_VALUE = "any value of few members"
REFERENCE = f"#/$defs/{ANY_VALUE.replace(' ', '%20')}"
DEFINITION: dict[str, Any] = {
    "anyOf": [
        {"type": ["string", "number", "boolean", "null"]},
        {"type": "array", "items": {"$ref": REFERENCE}},
        {
            "type": "object",
            "additionalProperties": {"$ref": REFERENCE},
            "maxProperties": MOST_MEMBERS,
        },
    ]
}
# A schema that has no other members than these allows any value.
NO_ASSERTIONS = {
    *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "x-guidance"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
}


def bound_members(nodes: Sequence[Node]) -> None:
    """Limit the members of all objects that the schema and those within it leave open."""
    root = nodes[0].schema
    definitions = root.get("$defs", {})
    # A reference is relative to the nearest `$id`.
    has_one_root = not any("$id" in node.schema for node in nodes[1:])
    if has_one_root and isinstance(definitions, dict):
        have_values = [_bound_values(node.schema) for node in nodes]
        if any(have_values):
            root["$defs"] = {**definitions, ANY_VALUE: DEFINITION}
    for node in nodes:
        _bound_object(node.schema)


def required_list(schema: dict[str, Any]) -> list[str] | None:
    """Return the names in `required`, or None for other values, which the library refuses."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return None
    return required


def _bound_object(schema: dict[str, Any]) -> None:
    """Limit the members of the object that one schema describes, if it leaves them open."""
    given = schema.get("properties", {})
    is_limited = schema.get("additionalProperties") is False or "maxProperties" in schema
    required, least = required_list(schema), schema.get("minProperties", 0)
    if is_limited or not _describes(schema, "object") or not isinstance(given, dict):
        return
    if required is None:
        return
    optional = [name for name in given if name not in required]
    if len(optional) > MOST_OPTIONAL or not isinstance(least, int):
        return
    schema["maxProperties"] = max(least, len({*given, *required})) + MOST_MEMBERS
    if optional:
        # The library counts members only if all listed ones are required.
        schema["properties"] = {name: given[name] for name in given if name in required}
        schema["patternProperties"] = {f"^{re.escape(name)}$": given[name] for name in optional}


def _bound_values(schema: dict[str, Any]) -> bool:
    """Limit the members of objects inside the values that one schema leaves open.

    Returns whether there are such values.
    """
    if schema.keys() <= NO_ASSERTIONS:
        schema["$ref"] = REFERENCE
        return True
    found = []
    if _describes(schema, "object"):
        found.append((schema, "additionalProperties"))
    if _describes(schema, "array"):
        found.append((schema, "items"))
    properties = schema.get("properties")
    if isinstance(properties, dict):
        found += [(properties, name) for name in properties]
    is_any = [owner.get(name, True) is True for owner, name in found]
    for (owner, name), is_open in zip(found, is_any, strict=True):
        if is_open:
            owner[name] = {"$ref": REFERENCE}
    return any(is_any)


def _describes(schema: dict[str, Any], kind: str) -> bool:
    """Return whether one schema alone says what its values of a type are."""
    kinds = schema.get("type")
    is_alone = schema.keys().isdisjoint(("anyOf", "oneOf", "$ref", "patternProperties"))
    return is_alone and isinstance(kinds, str | list) and kind in kinds
