"""The texts that a JSON schema allows, for arguments that stand without JSON's quotes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from server.text.parsers.allowed import (
    MAX_DEPTH,
    MAX_SCHEMAS,
    Schema,
    allowed_values,
    listed,
    referred,
)
from server.text.parsers.rules import escaped
from server.text.text_formats import FORMATS

ANY = ""  # no rule: every text
REST = "(?s:.*)"
TOKEN = re.compile(r"(?s)\\.|.")  # of a regular expression: a character, or one that is escaped
ESCAPES = {"/": r"\x2f", "\n": r"\n", "\r": r"\r"}


def texts_of(schema: Any, root: Schema) -> str:
    """Return the texts that `schema` allows as a terminal of a grammar; ANY if it allows all.

    `root` is the schema with its `$defs`.
    """
    return _Reader(root).read(schema, 0)


class _Reader:
    """Reads one schema. Its time is limited, because references may repeat without end."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_read = 0

    def read(self, schema: Any, depth: int) -> str:
        self._num_read += 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._num_read > MAX_SCHEMAS:
            return ANY
        terms = [*_of_keywords(schema), self.read(self._referred(schema), depth + 1)]
        terms += [self.read(part, depth + 1) for part in listed(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            options = [option for option in listed(schema, keyword) if self._has_text(option)]
            terms.append(_joined("|", (self.read(option, depth + 1) for option in options)))
        return _joined("&", terms)

    def _referred(self, schema: Schema) -> Any:
        return referred(schema.get("$ref"), self._root)

    def _has_text(self, schema: Any) -> bool:
        return "string" in allowed_values(schema, self._root)


def _joined(operator: str, terms: Iterable[str]) -> str:
    """Join terms that must all hold (&), or alternatives (|)."""
    given = list(dict.fromkeys(terms))
    if operator == "|" and ANY in given:
        return ANY
    kept = [term for term in given if term != ANY]
    return f"({f' {operator} '.join(kept)})" if len(kept) > 1 else "".join(kept)


def _of_keywords(schema: Schema) -> list[str]:
    """Return what `const`, `enum`, the length, `pattern` and `format` say of a text."""
    terms = []
    values = [*listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        terms.append(_joined("|", (f"/{escaped(text)}/" for text in texts)))
    least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", "")
    if least or most != "":
        terms.append(f"/(?s:.{{{least},{most}}})/")
    if isinstance(pattern := schema.get("pattern"), str):
        terms.append(f"/{_searched(pattern)}/")
    if (format := schema.get("format")) in FORMATS:
        terms.append(f"/{_delimited(FORMATS[format])}/")
    return terms


def _count(schema: Schema, keyword: str, default: int | str) -> int | str:
    """Return the value of a limit of the length; 2.0 is an integer in JSON Schema."""
    value = schema.get(keyword)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value == int(value) else default  # type: ignore[arg-type]


def _searched(pattern: str) -> str:
    """Return the expression of whole texts in which `pattern` is found."""
    options = []
    for option in _options(TOKEN.findall(pattern)):
        has_start, has_end = option[:1] == ["^"], option[-1:] == ["$"]
        bare = "".join(option[has_start : len(option) - has_end])
        options.append(f"{'' if has_start else REST}(?:{bare}){'' if has_end else REST}")
    return _delimited("|".join(options))


def _options(tokens: Iterable[str]) -> list[list[str]]:
    """Return the alternatives of an expression that are in no group."""
    found: list[list[str]] = [[]]
    depth, in_class = 0, False
    for token in tokens:
        if token == "|" and depth == 0 and not in_class:
            found.append([])
            continue
        found[-1].append(token)
        if in_class or token == "[":
            in_class = token != "]"
        elif token in ("(", ")"):
            depth += 1 if token == "(" else -1
    return found


def _delimited(pattern: str) -> str:
    """Return an expression as it stands between slashes, in one line."""
    return "".join(ESCAPES.get(token[-1], token) for token in TOKEN.findall(pattern))
