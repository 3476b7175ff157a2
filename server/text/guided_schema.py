"""JSON schemas as llguidance gets them: bounded, with our options, and with closed objects.

A schema that lists properties also allows others, unless it has `additionalProperties`. A model
could then add members without end, and a function gets arguments that it does not know. Answers
that have fewer members are still valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.text import exact_json
from server.text.schema_annotations import drop_annotations
from server.text.schema_bounds import bound_members, required_list
from server.text.schema_nodes import Node, nodes_of
from server.text.schema_numbers import check_numbers
from server.text.text_formats import FORMATS, STRICTER

MAX_NAME_PATTERNS = 128  # of one schema; the library compares them with each other
# An object is described in one place, unless its schema has one of these.
COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "patternProperties")
# With one of these anywhere, two schemas may describe the same object.
OVERLAPPING = ("allOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties")


def guided(
    schema: dict[str, Any], options: Mapping[str, Any], *, is_bounded: bool = False
) -> dict[str, Any]:
    """Return a schema for llguidance. Its own `x-guidance` options win over `options`.

    With `is_bounded`, an object that the schema leaves open has few members more.

    Raises ValueError if it has too many patterns in `patternProperties`, or a number that the
    library would change.
    """
    check_name_patterns(schema)
    own = schema.get("x-guidance")
    adapted = _adapted(schema, is_bounded=is_bounded)
    return {**adapted, "x-guidance": own if isinstance(own, dict) else options}


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


def _adapted(schema: dict[str, Any], *, is_bounded: bool) -> dict[str, Any]:
    """Return a copy that llguidance can follow, if it has only assertions that the library has."""
    try:
        copy: dict[str, Any] = exact_json.loads(exact_json.dumps(schema))
    except (TypeError, ValueError, RecursionError):
        return schema  # too deep for the library, too
    nodes = list(nodes_of(copy))
    for node in nodes:
        drop_annotations(node.schema)
        check_numbers(node)
    if _describe_objects_once(nodes):
        for node in nodes:
            if _is_open(node.schema):
                node.schema["additionalProperties"] = False
        if is_bounded:
            bound_members(nodes)
    for node in nodes:
        _hold_format(node.schema)
    return copy


def _hold_format(schema: dict[str, Any]) -> None:
    """Make the library refuse texts of a format that it allows, but most readers do not."""
    format = schema.get("format")
    if format in STRICTER:
        held = {"pattern": f"^(?:{FORMATS[format]})$"}
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), held]
        else:
            schema |= held


def _describe_objects_once(nodes: Sequence[Node]) -> bool:
    """Return whether no object with properties is also described by another schema.

    Otherwise a schema without free members could forbid every answer.
    """
    for _, schema in nodes:
        is_combined = "properties" in schema and not schema.keys().isdisjoint(COMBINING)
        if is_combined or not schema.keys().isdisjoint(OVERLAPPING):
            return False
    return True


def _is_open(node: dict[str, Any]) -> bool:
    """Return whether a schema lists all members that an object needs, but allows others."""
    properties = node.get("properties")
    if not isinstance(properties, dict) or "additionalProperties" in node:
        return False
    required = required_list(node)
    least = node.get("minProperties", 0)
    if required is None or not isinstance(least, int):
        return False  # the library refuses it
    return all(name in properties for name in required) and least <= len(properties)
