"""TaggedValue: one argument whose value stands between tags, without JSON's quotes."""

from __future__ import annotations

import json

from server.text.parsers.allowed import Allowed
from server.text.parsers.calls import Calls
from server.text.parsers.values import json_of


class TaggedValue:
    """A text streams. A value that may be another type is passed on when it is whole.

    With `is_stripped`, white space at the ends is no part of a text.
    """

    def __init__(
        self, calls: Calls, key: str, allowed: Allowed, *, is_stripped: bool = False
    ) -> None:
        self._calls = calls
        self._allowed = allowed
        self._is_text = set(allowed) == {"string"}
        self._parts: list[str] = []
        self._is_stripped = is_stripped
        self._has_begun = False
        self._space = ""  # at the end of a stripped text; dropped unless more text follows
        calls.key(key)
        if self._is_text:
            calls.arguments('"')

    def push(self, text: str) -> None:
        if not self._is_text:
            self._parts.append(text)
            return
        if self._is_stripped:
            text = self._stripped(text)
        self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _stripped(self, text: str) -> str:
        """Return what is certain to be a part of the stripped text."""
        if not self._has_begun:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._space += text
            return ""
        self._has_begun = True
        shown = self._space + kept
        self._space = text[len(kept) :]
        return shown

    def end(self) -> None:
        if self._is_text:
            self._calls.arguments('"')
            return
        text = "".join(self._parts)
        if self._is_stripped:
            text = text.strip()
        self._calls.arguments(json_of(text, self._allowed))
