"""GenerationObserver: what metrics, traces and records learn of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from engine.protocol.generate import GenerateRequest
from engine.protocol.outputs import Admission, TokenOutput
from server.telemetry.choice_record import ChoiceRecord
from server.text.deltas import CallOutcome

# Why a request ended before its answer was complete.
AbortReason = Literal[
    "disconnect", "send_timeout", "engine", "shutdown", "rejected", "numerical", "internal"
]


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine has accepted the requests, one per choice."""

    requests: Sequence[GenerateRequest]


class Token(msgspec.Struct, frozen=True, gc=False):
    """The engine sampled a token at the time `at`. Times are CLOCK_MONOTONIC seconds.

    A Struct, because one is made for each token: a frozen dataclass takes ten times as long.
    """

    output: TokenOutput
    choice: int
    at: float
    last: float  # when the choice got its last token; 0.0: this is its first
    is_dropped: bool  # the request wants no tokens
    submitted: float
    admission: Admission | None  # None: not known, or not the first token


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice is complete."""

    record: ChoiceRecord
    outcomes: Sequence[CallOutcome]  # of its tool calls


@dataclass(frozen=True, slots=True)
class Closed:
    """The HTTP request has ended at the time `at`, in CLOCK_MONOTONIC seconds."""

    records: Sequence[ChoiceRecord]  # one per choice
    cached_tokens: int  # of all prompts, each counted once
    reason: AbortReason | None  # None: every choice is complete
    at: float


class GenerationObserver(Protocol):
    """One observer of one generation. A method that is not overridden does nothing.

    `closed` follows every `begun` that does not raise. A generation that the engine refuses calls
    neither.
    """

    def submission(self) -> AbstractContextManager[None]:
        """Return the context in which the requests are sent and `begun` is called."""
        return nullcontext()

    def begun(self, begun: Begun) -> None:
        """The engine has accepted the requests."""
        return None

    def token(self, token: Token) -> None:
        """A token was sampled, before it is added to its choice."""
        return None

    def finished(self, finished: Finished) -> None:
        """A choice is complete."""
        return None

    def closed(self, closed: Closed) -> None:
        """The HTTP request has ended."""
        return None


# Makes the observer of one PreparedRequest, or None. Naming that class here would make the
# telemetry import the generation.
ObserverFactory = Callable[[Any], GenerationObserver | None]
