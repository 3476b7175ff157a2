"""The schemas inside a JSON schema, of all drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# Members of a schema that contain schemas by name, and members that are one or a list of them.
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
NESTED = {
    *("items", "additionalItems", "prefixItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
}


class Node(NamedTuple):
    """A schema, and its place in the whole one: `properties.a`, or "" for the whole."""

    path: str
    schema: dict[str, Any]


def nodes_of(schema: dict[str, Any]) -> Iterator[Node]:
    """Yield a schema and all schemas within it, also those that only a `$ref` makes schemas."""
    referenced = _referenced(schema)
    unread: list[tuple[str, Any]] = [("", schema)]
    while unread:
        path, value = unread.pop()
        if isinstance(value, list):
            unread += [(f"{path}.{index}", item) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            continue
        yield Node(path, value)
        prefix = f"{path}." if path else ""
        for name, member in value.items():
            if name in NESTED or name in referenced:
                unread.append((f"{prefix}{name}", member))
            elif name in NAMED and isinstance(member, dict):
                unread += [(f"{prefix}{name}.{key}", item) for key, item in member.items()]


def _referenced(schema: dict[str, Any]) -> set[str]:
    """Return the names in the pointers of all references, as in `#/components/schemas/A`."""
    names: set[str] = set()
    unread: list[Any] = [schema]
    while unread:
        value = unread.pop()
        if isinstance(value, list):
            unread += value
        elif isinstance(value, dict):
            unread += value.values()
            reference = value.get("$ref")
            if isinstance(reference, str):
                names.update(reference.partition("#")[2].split("/"))
    return names - NAMED
