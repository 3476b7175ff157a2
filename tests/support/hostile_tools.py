"""Parameters of tools that are no schemas, or strange ones."""

from __future__ import annotations

from typing import Any


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of objects inside objects."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE_PARAMETERS: dict[str, Any] = {
    "props list": {"type": "object", "properties": ["a"]},
    "props str": {"type": "object", "properties": "a"},
    "prop not schema": {"type": "object", "properties": {"a": 3, "b": None, "c": [], "d": True}},
    "required str": {"type": "object", "properties": {"a": {"type": "string"}}, "required": "a"},
    "required nested": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": [["a"], {}, 3],
    },
    "required unknown": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["zz"],
    },
    "enum int": {"type": "object", "properties": {"a": {"type": "string", "enum": [1, None, "x"]}}},
    "enum str": {"type": "object", "properties": {"a": {"type": "string", "enum": "xyz"}}},
    "enum empty": {"type": "object", "properties": {"a": {"type": "string", "enum": []}}},
    "enum marks": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "enum": ["</tool_call>", "\n", "", "a'b\"c\\", "é😀"]}
        },
    },
    "type list": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
    "type int": {"type": "object", "properties": {"a": {"type": 5}}},
    "type dict": {"type": "object", "properties": {"a": {"type": {}}}},
    "top string": {"type": "string"},
    "top list": {"type": ["object", "null"]},
    "ref self": {"$ref": "#"},
    "ref prop": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "ref rec": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
    },
    "ref missing": {"type": "object", "properties": {"a": {"$ref": "#/$defs/zz"}}},
    "defs not obj": {"type": "object", "properties": {"a": {"$ref": "#/$defs/zz"}}, "$defs": 3},
    "keys": {
        "type": "object",
        "properties": {
            k: {"type": "string"}
            for k in [
                "__proto__",
                "",
                "a b",
                "\n",
                '"',
                "\\",
                "</parameter>",
                "é😀",
                "<|x|>",
                "a" * 1000,
                "'",
                "a=b",
                "a:b",
                "\x00",
                "/x/",
                "%json",
                "\ufdd0",
            ]
        },
    },
    "many": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(300)}},
    "nested deeply": nested(400),
    "xguid": {
        "type": "object",
        "x-guidance": 3,
        "properties": {"a": {"type": "integer", "x-guidance": {"lenient": True}}},
    },
    "pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)("}}},
    "allOf": {"allOf": [{"type": "object"}], "not": {}},
    "additional": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": "x",
    },
    "bignum": {"type": "object", "properties": {"a": {"type": "integer", "minimum": -(10**300)}}},
    "emptyobj": {},
    "proto": {"__proto__": {"x": 1}, "constructor": 3},
}
