"""Grammars that are expensive to compile, or that llguidance must refuse.

No two are equal, because the server keeps what it has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Body = dict[str, Any]  # the fields of a request that ask for structured output


def hostile_bodies(count: int) -> list[Body]:
    """Return the fields of `count` requests, whose grammars differ."""
    made = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        made.append(kind(number))
    return made


def _schema(schema: dict[str, Any], number: int) -> Body:
    return {"structured_outputs": {"json": {**schema, "title": f"hostile {number}"}}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def deep_nesting(number: int) -> Body:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(100):
        schema = _object({f"level{level}": schema})
    return _schema(schema, number)


def huge_enum(number: int) -> Body:
    texts = [f"value {number} {text * 7919:x}" for text in range(8000)]
    return _schema(_object({"a": {"enum": texts}}), number)


def wide_object(number: int) -> Body:
    """Every property may be missing."""
    properties = {f"property{name}": {"type": ["string", "null"]} for name in range(1500)}
    return _schema({"type": "object", "properties": properties}, number)


def long_array(number: int) -> Body:
    items = {"type": "string", "minLength": 3, "maxLength": 3000}
    schema = {"type": "array", "items": items, "minItems": 500 + number, "maxItems": 5000}
    return _schema(_object({"a": schema}), number)


def nested_counts(number: int) -> Body:
    """The lengths multiply: 30 x 30 x 30 x 30 items."""
    schema: dict[str, Any] = {"type": "string", "maxLength": 1000 + number}
    for _ in range(4):
        schema = {"type": "array", "items": schema, "minItems": 30, "maxItems": 60}
    return _schema(_object({"a": schema}), number)


def many_alternatives(number: int) -> Body:
    """All alternatives begin in the same way, so the parser must follow all of them."""
    branches = []
    for branch in range(400):
        last = {"const": f"{number} {branch}"}
        text = {"type": "string"}
        branches.append(_object({"kind": text, "name": text, "last": last}))
    return _schema({"anyOf": branches}, number)


def reference_graph(number: int) -> Body:
    """Every definition refers to ten others."""
    definitions = {}
    for name in range(300):
        targets = [(name * 7 + step * step) % 300 for step in range(10)]
        properties = {f"p{target}": {"$ref": f"#/$defs/d{target}"} for target in targets}
        definitions[f"d{name}"] = {"type": "object", "properties": properties}
    return _schema({"$ref": f"#/$defs/d{number % 300}", "$defs": definitions}, number)


def intersections(number: int) -> Body:
    """Each `allOf` part adds patterns that must hold together."""
    parts = []
    for part in range(40):
        pattern = f"^[a-z0-9]*{part % 10}[a-z0-9]{{{part},{part + 40}}}$"
        parts.append({"type": "string", "pattern": pattern})
    return _schema(_object({"a": {"allOf": parts}}), number)


def multiples(number: int) -> Body:
    numbers = {"type": "integer", "multipleOf": 99_991 + 2 * number, "minimum": 0}
    return _schema(_object({"a": numbers}), number)


def exponential_regex(number: int) -> Body:
    """A deterministic automaton of this pattern has 2 ** 24 states."""
    return {"structured_outputs": {"regex": f"(a|b)*a(a|b){{24}}[0-9]{{{1 + number}}}"}}


def nested_repetitions(number: int) -> Body:
    line = "(([a-z]{1,50} ){1,50}){1,50}\n"
    return {"structured_outputs": {"regex": f"({line}){{1,{number + 9}}}"}}


def unicode_regex(number: int) -> Body:
    return {"structured_outputs": {"regex": rf"(\p{{L}}|\p{{N}}){{100,{2000 + number}}}\w+\W+\w+"}}


def long_grammar(number: int) -> Body:
    """A GBNF grammar of 120 rules."""
    rules = [f'root ::= r0 "{number}"']
    for rule in range(118):
        following = f"r{rule + 1}"
        rules.append(f'r{rule} ::= "a{rule}" ({following} | "b")? | [a-z]+ {following}')
    rules.append('r118 ::= "end"')
    return {"structured_outputs": {"grammar": "\n".join(rules)}}


def deep_chain(number: int) -> Body:
    """A Lark grammar of 10,000 rules that refer to the next one."""
    rules = [f'start: r0 "{number}"']
    for rule in range(10_000):
        rules.append(f'r{rule}: "a" r{rule + 1} | "b"')
    rules.append('r10000: "end"')
    return {"structured_outputs": {"grammar": "\n".join(rules)}}


def name_patterns(number: int) -> Body:
    """All patterns of names are compared with each other."""
    patterns = {f"^p{name}[a-z]*{number}$": {"type": "integer"} for name in range(120)}
    return _schema({"type": "object", "patternProperties": patterns}, number)


def ambiguous_grammar(number: int) -> Body:
    """Every text has very many derivations."""
    grammar = f'root ::= e "{number}"\ne ::= e e | e "+" e | "(" e ")" | e e e | [a-z] | ""'
    return {"structured_outputs": {"grammar": grammar}}


def many_choices(number: int) -> Body:
    texts = [f"{number} {choice:x}" * 5 for choice in range(4000)]
    return {"structured_outputs": {"choice": texts}}


KINDS: tuple[Callable[[int], Body], ...] = (
    deep_nesting,
    huge_enum,
    wide_object,
    long_array,
    nested_counts,
    many_alternatives,
    reference_graph,
    intersections,
    multiples,
    exponential_regex,
    nested_repetitions,
    unicode_regex,
    long_grammar,
    deep_chain,
    name_patterns,
    ambiguous_grammar,
    many_choices,
)
