"""Regular expressions for names of modules, which come with an adapter.

Python's `re` may take exponential time for an expression that a stranger wrote. So it gets plain
names only, in which nothing repeats. Other expressions run in the linear-time engine of
pydantic-core (the Rust crate `regex`), which has no look-around and no backreferences.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

LONGEST = 2048  # characters of an expression
PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")  # a dot without a backslash is any character


class NamePattern:
    """An expression that the end of a module's name must match, after a dot or from the start.

    `get_pattern_key` of PEFT 0.21 matches `(.*\\.)?(PATTERN)$`. Raises ValueError if the expression
    is invalid, too long, or needs backtracking.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters; at most {LONGEST} are read.")
        self.is_plain = PLAIN.fullmatch(text) is not None
        whole = rf"\A(?:(?s:.*)\.)?(?:{text})"
        self._name: re.Pattern[str] | None = None
        self._expression: Any = None
        if self.is_plain:
            self._name = re.compile(whole + r"\Z")
        else:
            _compiled(text)  # alone, too: `a)|(?:b` would leave the group
            self._expression = _compiled(whole + r"\z")

    def matches(self, name: str) -> bool:
        if self._name is not None:
            return self._name.match(name) is not None
        try:
            self._expression.validate_python(name)
        except ValidationError:
            return False
        return True


def _compiled(pattern: str) -> SchemaValidator:
    """Return a validator of texts. An expression of over 10 MiB is refused by the engine."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        *_, reason = str(error).splitlines()
        reason = reason.strip().removeprefix("error: ").rstrip(".")
        message = f"it is no regular expression without look-around and backreferences ({reason})."
        raise ValueError(message) from None
