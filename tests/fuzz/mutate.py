"""Random changes of bytes, and of the values in a JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

MAX_BYTES = 200_000
MAX_VALUES = 20_000  # of a JSON document: lists that are repeated several times grow fast
NUMBERS = (0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "a",
    "\0",
    "\x1b[31m",
    "\n",
    "\ud800",
    "é",
    "日本",
    "👍",
    "x" * 5000,
    "../x",
    "%s",
)
OTHERS = (None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": []}})


def has_more_values(document: Any, limit: int) -> bool:
    """Return whether a JSON document has more than `limit` values."""
    waiting, count = [document], 0
    while waiting and count <= limit:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return count > limit


def interesting(random: Random) -> Any:
    """Return a value at the edge of some type."""
    return random.choice((*NUMBERS, *FLOATS, *TEXTS, *OTHERS))


def mutate_json(random: Random, document: Any) -> Any:
    """Return the document with one value changed, removed, added, repeated or nested."""
    if random.random() < 0.2 or not isinstance(document, dict | list) or not document:
        return _changed(random, document)
    if isinstance(document, list):
        items = list(document)
        place = random.randrange(len(items))
        match random.randrange(6):
            case 0:
                del items[place]
            case 1:
                items.insert(place, interesting(random))
            case 2:
                items = items * random.choice((2, 50))
            case _:
                items[place] = mutate_json(random, items[place])
        return items
    fields = dict(document)
    key = random.choice(list(fields))
    match random.randrange(6):
        case 0:
            del fields[key]
        case 1:
            fields[random.choice((key + "s", "", "stream", "n"))] = interesting(random)
        case _:
            fields[key] = mutate_json(random, fields[key])
    return fields


def _changed(random: Random, value: Any) -> Any:
    match random.randrange(5):
        case 0:
            return [value]
        case 1:
            return {"a": value}
        case 2 if isinstance(value, str):
            return mutate_bytes(random, value.encode("utf-8", "replace")).decode("utf-8", "replace")
        case 3 if isinstance(value, int | float):
            return random.choice((-value, str(value), value + 1, float("nan")))
        case _:
            return interesting(random)


def mutate_json_bytes(random: Random, data: bytes) -> bytes:
    """Change values of a JSON document, and sometimes its bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(random, data)
    for _ in range(random.choice((1, 1, 2, 5))):
        changed = mutate_json(random, document)
        if not has_more_values(changed, MAX_VALUES):
            document = changed
    try:
        data = json.dumps(document, ensure_ascii=random.random() < 0.9).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return data
    if random.random() < 0.1:
        data = mutate_bytes(random, data)
    if random.random() < 0.01:
        data = b"[" * 5000 + data
    return data[:MAX_BYTES]


def mutate_bytes(random: Random, data: bytes, words: Sequence[bytes] = ()) -> bytes:
    """Change, remove, repeat or insert a few bytes, or one of `words`."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        begin = random.randrange(len(changed) + 1)
        end = min(len(changed), begin + random.choice((1, 2, 8, 64)))
        match random.randrange(6):
            case 0:
                del changed[begin:end]
            case 1:
                changed[begin:begin] = changed[begin:end] * random.choice((1, 3, 100))
            case 2:
                changed[begin:end] = random.randbytes(end - begin)
            case 3 if words:
                changed[begin:begin] = random.choice(words)
            case 4 if begin < len(changed):
                changed[begin] ^= 1 << random.randrange(8)
            case _:
                changed[begin:begin] = bytes([random.choice((0, 10, 13, 32, 34, 127, 128, 255))])
    return bytes(changed[:MAX_BYTES])
