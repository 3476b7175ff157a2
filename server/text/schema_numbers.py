"""Numbers of a JSON schema that llguidance would change are refused.

It computes with doubles and 64-bit integers, and writes what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from server.text import exact_json
from server.text.schema_nodes import Node

EXACT = 2**53  # up to here, every integer is a double, and so is the next one
INT64 = 2**63
MOST_MULTIPLE = 10**7  # of `multipleOf`, without its point: the library counts all remainders
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def check_numbers(node: Node) -> None:
    """Raise ValueError for a number of a schema that would be changed. It names the number."""
    for name in ("const", "enum"):
        for path, value in _numbers(name, node.schema.get(name)):
            if not _is_kept(value):
                raise _changed(node, path, value)
    for name, exclusive in EXCLUSIVE.items():
        value = node.schema.get(name)
        limit = node.schema.get(exclusive)
        if _is_number(value) and not _is_kept_bound(node, name, value, limit is True):
            raise _changed(node, name, value)
        if _is_number(limit) and not _is_kept_bound(node, exclusive, limit, is_exclusive=True):
            raise _changed(node, exclusive, limit)
    value = node.schema.get("multipleOf")
    if _is_number(value) and not _is_kept_multiple(value):
        raise _changed(node, "multipleOf", value)


def _changed(node: Node, name: str, value: Any) -> ValueError:
    path = f"{node.path}.{name}".lstrip(".")
    number = exact_json.shown(value)
    return ValueError(f"{path} has the number {number}, which a grammar cannot hold exactly")


def _numbers(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a JSON value, each with its place."""
    unread = [(path, value)]
    while unread:
        path, value = unread.pop()
        if isinstance(value, dict):
            unread += [(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            unread += [(f"{path}.{index}", item) for index, item in enumerate(value)]
        elif _is_number(value):
            yield path, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_kept(value: Any) -> bool:
    """Return whether a double holds the number, and a 64-bit integer its whole part."""
    if isinstance(value, Decimal):
        return False
    is_double = isinstance(value, float) or int(float(value)) == value
    return bool((is_double and abs(value) < INT64) or value == INT64 - 1)


def _is_kept_bound(node: Node, name: str, value: Any, is_exclusive: bool) -> bool:
    if is_exclusive:  # the library adds or subtracts 1
        return _is_kept(value) and abs(value) < EXACT
    if value != INT64 - 1:
        return _is_kept(value)
    kinds = node.schema.get("type")
    return name == "maximum" and "integer" in (kinds or ()) and "number" not in (kinds or ())


def _is_kept_multiple(value: Any) -> bool:
    """Return whether the library finds the digits of `multipleOf`, as it looks for them."""
    if isinstance(value, Decimal) or not abs(value) <= EXACT:
        return False
    digits, exponent = abs(float(value)), 0
    while digits % 1:
        digits *= 10
        exponent += 1
    is_exact = Decimal(int(digits)).scaleb(-exponent) == Decimal(repr(value)).copy_abs()
    return is_exact and int(digits) <= MOST_MULTIPLE
