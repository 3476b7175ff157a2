"""TaggedValue: one argument whose value stands between tags, without JSON's quotes."""

from __future__ import annotations

import json

from server.text.parsers.calls import Calls, ValueKind


class TaggedValue:
    """A text streams. Another value is passed on when it is whole, because it may be a text."""

    def __init__(self, calls: Calls, key: str, kind: ValueKind) -> None:
        self._calls = calls
        self._kind = kind
        self._text = ""
        calls.key(key)
        if kind == "text":
            calls.arguments('"')

    def push(self, text: str) -> None:
        if self._kind == "text":
            self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._text += text

    def end(self) -> None:
        if self._kind == "text":
            self._calls.arguments('"')
        else:
            self._calls.value(self._text.strip(), self._kind)
