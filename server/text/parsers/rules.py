"""Rules of a grammar in the Lark dialect of llguidance.

See docs/syntax.md of github.com/guidance-ai/llguidance. `<[7]>` is token 7, and `suffix` ends a
text at its first occurrence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from server.text import exact_json
from server.text.guided_schema import guided
from server.text.marks import Marks

ANY_TEXT = "/(?s:.*)/"
NUMBER = "/[0-9]{1,3}/"


class GrammarRules:
    """Collects the rules of a grammar. Names of rules are small, those of terminals capital."""

    def __init__(
        self, marks: Marks, json_options: Mapping[str, Any], *, is_bounded: bool = False
    ) -> None:
        self.marks = marks
        self._json_options = json_options
        self._is_bounded = is_bounded  # objects that a schema leaves open have few members
        self._rules: dict[str, str] = {}

    def add(self, prefix: str, definition: str, attributes: str = "") -> str:
        """Add a rule. Return its name, which begins with `prefix`."""
        name = f"{prefix}{len(self._rules)}"
        self._rules[name + attributes] = definition
        return name

    def define(self, name: str, definition: str) -> None:
        """Add a rule that refers to itself, once."""
        self._rules[name] = definition

    def literal(self, text: str) -> str:
        """Return a fixed text, with its tokens as tokens."""
        parts = []
        plain = ""
        for char in self.marks.encode(text):
            token = self.marks.ids.get(char)
            if token is None:
                plain += char
                continue
            parts += [json.dumps(plain)] if plain else []
            parts.append(f"<[{token}]>")
            plain = ""
        parts += [json.dumps(plain)] if plain else []
        return " ".join(parts)

    def any_text(self) -> str:
        """Return any text without marks."""
        return self.add("FREE", ANY_TEXT)

    def until(self, closing: str, *excluded: str, pattern: str = "", texts: str = "") -> str:
        """Return any text without `excluded` up to `closing`, and `closing`.

        With `pattern`, the text must not match it. With `texts`, a terminal, it is one of these.
        """
        text = _text_without(excluded, pattern) + (f" & ({texts})" if texts else "")
        if self.is_token(closing.strip()):  # white space before it is a part of the terminal
            if texts:
                space = closing[: len(closing) - len(closing.lstrip())]
                text = f"({text}) {json.dumps(space)}" if space else text
            return f"{self.add('FREE', text)} {self.literal(closing.lstrip())}"
        return self.add("text", text, f"[suffix={json.dumps(closing)}]")

    def is_token(self, text: str) -> bool:
        """Return whether `text` begins with a token."""
        return self.marks.encode(text)[:1] in self.marks.ids

    def text_without(self, *excluded: str, pattern: str = "") -> str:
        """Return any text without `excluded` that does not match `pattern`."""
        return self.add("FREE", _text_without(excluded, pattern))

    def json(self, schema: Any) -> str:
        """Return JSON that fits a schema. Raises ValueError as `guided` does."""
        if isinstance(schema, dict):
            schema = guided(schema, self._json_options, is_bounded=self._is_bounded)
        return self.add("json", f"%json {exact_json.text(schema)}")

    def text(self, start: str) -> str:
        lines = [f"start: {start}", *(f"{name}: {rule}" for name, rule in self._rules.items())]
        return "\n".join(lines) + "\n"


def _text_without(excluded: Iterable[str], pattern: str) -> str:
    """Return the pattern of any text without `excluded` that does not match `pattern`."""
    terms = [ANY_TEXT]
    for text in excluded:
        terms.append(f"~/(?s:.*){escaped(text)}(?s:.*)/")
    if pattern:
        terms.append(f"~/{pattern}/")
    return " & ".join(terms)


def escaped(text: str) -> str:
    """Return the regular expression of a fixed text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)
