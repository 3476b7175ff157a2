"""The types and values that a JSON schema allows, for arguments that stand without quotes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from server.text import exact_json

# A type, and its values where `enum` or `const` lists them; None: any value of the type. Of
# numbers, "number" has those with a fraction or an exponent, and "integer" the others.
Allowed = Mapping[str, tuple[Any, ...] | None]
Schema = Mapping[str, Any]

ANY: Allowed = dict.fromkeys(
    ("null", "boolean", "integer", "number", "string", "array", "object"), None
)
ANY_TEXT: Allowed = {"string": None}
MAX_SCHEMAS = 1024  # that are read for one argument; one with more allows anything
MAX_DEPTH = 64


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float() | Decimal():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def allows(allowed: Allowed, value: Any) -> bool:
    """Return whether a value is among the allowed ones."""
    kind = type_of(value)
    if kind not in allowed:
        return False
    choices = allowed[kind]
    try:
        return choices is None or value in choices
    except RecursionError:
        return False


def allowed_values(schema: Any, root: Schema) -> Allowed:
    """Return what `schema` allows. `root` is the schema with its `$defs`.

    Of a value, its type and the lists of `enum` and `const` count, not its length or its parts.
    """
    try:
        return _Reader(root).read(schema, 0)
    except RecursionError:  # of the values of `enum`
        return ANY


def properties_of(root: Schema) -> dict[str, Any]:
    """Return the schemas of an object's members, also of those behind `$ref` and `allOf`."""
    found: dict[str, Any] = {}
    for part in _parts(root):
        properties = part.get("properties")
        if isinstance(properties, dict):
            found |= {name: found.get(name, schema) for name, schema in properties.items()}
    return found


def required_names(root: Schema) -> list[str]:
    """Return the names of an object's required members."""
    found: list[str] = []
    for part in _parts(root):
        names = part.get("required")
        if isinstance(names, list):
            found += [name for name in names if isinstance(name, str)]
    return found


def _parts(root: Schema) -> list[Schema]:
    """Return a schema and those that hold together with it: by `$ref` and `allOf`."""
    parts: list[Schema] = []
    unread: list[Any] = [root]
    while unread and len(parts) < MAX_DEPTH:
        schema = unread.pop(0)
        if not isinstance(schema, dict) or any(schema is part for part in parts):
            continue
        parts.append(schema)
        unread.append(referred(schema.get("$ref"), root))
        both = schema.get("allOf")
        unread += both if isinstance(both, list) else []
    return parts


def referred(reference: Any, root: Schema) -> Any:
    """Return the schema at a reference within `root`; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


class _Reader:
    """Reads one schema. Its time is limited, because references may repeat without end."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_read = 0

    def read(self, schema: Any, depth: int) -> Allowed:
        self._num_read += 1
        if schema is False:
            return {}
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._num_read > MAX_SCHEMAS:
            return ANY
        allowed = _of_keywords(schema)
        if "$ref" in schema:
            allowed = _both(allowed, self.read(referred(schema["$ref"], self._root), depth + 1))
        for part in listed(schema, "allOf"):
            allowed = _both(allowed, self.read(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            options = listed(schema, keyword)
            if options:
                read = [self.read(option, depth + 1) for option in options]
                allowed = _both(allowed, _either(read))
        return allowed


def listed(schema: Schema, keyword: str) -> list[Any]:
    """Return the list of a keyword; empty if it has none."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _of_keywords(schema: Schema) -> Allowed:
    """Return what `type`, `nullable`, `enum` and `const` allow."""
    allowed = _of_types(schema.get("type"))
    if schema.get("nullable") is True:
        allowed = {**allowed, "null": None}
    if "enum" in schema:
        allowed = _both(allowed, _of_values(listed(schema, "enum")))
    if "const" in schema:
        allowed = _both(allowed, _of_values([schema["const"]]))
    return allowed


def _of_types(kinds: Any) -> Allowed:
    names = kinds if isinstance(kinds, list) else [kinds]
    if not names or not all(isinstance(name, str) and name in ANY for name in names):
        return ANY
    allowed: Allowed = dict.fromkeys(names, None)
    return {**allowed, "integer": None} if "number" in allowed else allowed


def _of_values(values: Iterable[Any]) -> Allowed:
    allowed: dict[str, list[Any]] = {}
    for value in values:
        allowed.setdefault(type_of(value), []).append(value)
    return {kind: tuple(found) for kind, found in allowed.items()}


def _either(options: Iterable[Allowed]) -> Allowed:
    allowed: dict[str, tuple[Any, ...] | None] = {}
    for option in options:
        for kind, values in option.items():
            before = allowed.get(kind, ())
            allowed[kind] = None if values is None or before is None else (*before, *values)
    return allowed


def _both(first: Allowed, second: Allowed) -> Allowed:
    allowed: dict[str, tuple[Any, ...] | None] = {}
    for kind in first.keys() & second.keys():
        values = _common(first[kind], second[kind])
        if values is None or values:
            allowed[kind] = values
    return allowed


def _common(first: tuple[Any, ...] | None, second: tuple[Any, ...] | None) -> Any:
    if first is None or second is None:
        return second if first is None else first
    written = {exact_json.text(value, sort_keys=True) for value in second}
    return tuple(value for value in first if exact_json.text(value, sort_keys=True) in written)
