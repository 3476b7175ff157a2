"""ApiKey: one API key, and the limits of its owner.

This module imports no HTTP library, as `server.http.key_file`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

NUMBER = re.compile("[1-9][0-9]{0,8}")
OTHER_SETTINGS = ("label", "priority")  # of a line, besides its limits


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    concurrent_requests: int | None = None


def parse_limits(words: Sequence[str]) -> KeyLimits:
    """Return the limits that `words` set, each as NAME=NUMBER. Raises ValueError for others."""
    names = [field.name for field in fields(KeyLimits)]
    known = ", ".join([*names, *OTHER_SETTINGS])
    found: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in names:
            raise ValueError(f"{name[:32]!r} is not a setting of a key; a key may have {known}")
        if not NUMBER.fullmatch(number):
            raise ValueError(f"{name} must be a number from 1 to 999999999")
        found[name] = int(number)
    return KeyLimits(**found)


NO_LIMITS = KeyLimits()


@dataclass(frozen=True)
class ApiKey:
    """A key, and what its owner may use."""

    text: str
    limits: KeyLimits = NO_LIMITS
    is_admin: bool = False
    may_prioritize: bool = False  # admins always may
    label: str = ""  # for the log; "": the first digits of the digest

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()
