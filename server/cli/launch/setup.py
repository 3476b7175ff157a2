"""The facts of a server that a coding agent needs, and its setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_OUTPUT = 8192  # tokens of an answer
KEY_VARIABLE = "PENSTOCK_API_KEY"
NO_KEY = "none"  # clients refuse an empty key


@dataclass(frozen=True)
class Target:
    """The served model that a client will use.

    `url` has no /v1, `context` is in tokens, and `folder` holds the client's own configuration.
    """

    url: str
    key: str
    model: str
    context: int
    folder: Path
    is_here: bool  # a loopback address, which no proxy reaches

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        """Tokens of the context that are kept for an answer."""
        return min(MAX_OUTPUT, self.context // 4)


@dataclass(frozen=True)
class Setup:
    """How a client is started.

    The names of `files` are relative to the folder of its configuration. They are written at each
    start, `first_files` only if they are missing: the client changes them. The key is in the
    environment, never in a file. `unset` are variables that would lead the client elsewhere.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    first_files: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True)
class Client:
    """A coding agent. `prompt_tokens` is what it sends before the first word of its user."""

    title: str
    command: str
    package: str  # how it is installed
    prompt_tokens: int
    calls_tools: bool
    setup: Callable[[Target], Setup]
