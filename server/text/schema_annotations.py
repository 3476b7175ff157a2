"""Members of a JSON schema that assert nothing, but that llguidance refuses, are left out.

JSON Schema 2020-12 says so of unknown formats (section 7.2.3) and of keywords that only modify an
absent one. Members that assert something stay, so that the library refuses what it cannot follow.
"""

from __future__ import annotations

import re
from sys import float_info
from typing import Any

from server.text.text_formats import FORMATS

OLD_DIALECT = re.compile(r"https?(://json-schema\.org/draft-0[3467]/schema)#?")
NEW_DIALECT = re.compile(r"https?(://json-schema\.org/draft/(?:2019-09|2020-12|next)/schema)#?")
# Without the second keyword, the first one asserts nothing.
MODIFIERS = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Values with which these keywords allow everything.
ANYTHING: tuple[Any, ...] = (True, {})
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (*ANYTHING, {"type": "string"}),
    "unevaluatedProperties": ANYTHING,
    "unevaluatedItems": ANYTHING,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "$recursiveAnchor": (False, True),
    # zod writes these for a number of 64 bits: all numbers of JSON that a double holds.
    "minimum": (-float_info.max,),
    "maximum": (float_info.max,),
}


def drop_annotations(schema: dict[str, Any]) -> None:
    """Change one schema, without those within it, to what its assertions are."""
    given = schema.get("format")
    if isinstance(given, str) and given not in FORMATS:  # which llguidance compiles, too
        del schema["format"]
    _set_dialect(schema)
    if anchor := schema.pop("$dynamicAnchor", None):
        schema.setdefault("$anchor", anchor)
    if "if" in schema and "then" not in schema and "else" not in schema:
        del schema["if"]
    for name, modified in MODIFIERS.items():
        if modified not in schema:
            schema.pop(name, None)
    for name, values in WITHOUT_EFFECT.items():
        if name in schema and any(_same(schema[name], value) for value in values):
            del schema[name]
    for name in COUNTS:  # 2.0 is an integer in JSON Schema
        count = schema.get(name)
        if isinstance(count, float) and count.is_integer():
            schema[name] = int(count)


def _same(given: Any, value: Any) -> bool:
    """Return whether two JSON values are equal. 0 is not false."""
    return type(given) is type(value) and bool(given == value)


def _set_dialect(schema: dict[str, Any]) -> None:
    """Write a draft's `$schema` as the library knows it. Others are read as 2020-12."""
    given = schema.pop("$schema", None)
    if not isinstance(given, str):
        return
    if old := OLD_DIALECT.fullmatch(given):
        schema["$schema"] = f"http{old[1]}#"
    elif new := NEW_DIALECT.fullmatch(given):
        schema["$schema"] = f"https{new[1]}"
