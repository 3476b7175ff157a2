"""Messages between the parent and the server of one model, as lines of JSON on a socket pair.

The parent sends one line, a Start. The end of the stream tells each side that the other has ended:
the server then ends too, even if the parent was killed.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from server.config import ServerConfig

LONGEST_LINE = 4 << 20  # bytes


class Start(msgspec.Struct, frozen=True):
    """The configuration to serve, and the path of the Unix socket to listen on."""

    server: ServerConfig
    engine: EngineConfig
    socket: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and accepts requests."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The stage of loading; `fraction` is from 0 to 1."""

    stage: str
    fraction: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served. `reason` is for the log: it may have paths."""

    reason: str


class UsedTokens(msgspec.Struct, frozen=True, tag=True):
    """Tokens that requests used since the last report, by the digest of their API key."""

    tokens: dict[str, int]


Report = Loaded | Loading | Failed | UsedTokens
