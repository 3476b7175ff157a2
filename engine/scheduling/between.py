"""Between: a part of the engine that works between the steps of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.errors import RequestRejectedError
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import GenerateRequest
from engine.protocol.message import Message
from engine.protocol.outputs import Admission, EngineStats, TokenOutput
from engine.scheduling.step import Step


class Outcome(NamedTuple):
    """The results of a part's work."""

    ready: Sequence[GenerateRequest] = ()  # requests that it kept, and which may go on now
    refused: Mapping[int, RequestRejectedError] = {}  # by request


class RetiredStep(NamedTuple):
    """A step whose outputs were sent, or a change of the counts without a step."""

    at: float  # CLOCK_MONOTONIC seconds, as in StepOutputs
    stats: EngineStats
    step: Step | None = None
    launched_at: float = 0.0
    outputs: Sequence[TokenOutput] = ()


class Between:
    """One of the loop's parts: grammars, adapter loads, captures, inspection.

    The loop knows none by name. A new request passes the parts in order, and then goes to the
    scheduler's queue. A part defines what it needs; by default it does nothing.
    """

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do that needs no message and no step."""
        return False

    @property
    def is_waiting(self) -> bool:
        """Whether something runs elsewhere, and `work` has to be called when it ends."""
        return False

    def wait(self) -> None:
        """Wait a moment for what runs elsewhere. The engine has nothing else to do."""

    def handle(self, message: Message) -> bool:
        """Take a message. Return whether the part keeps it, so that no other part gets it.

        Raises RequestRejectedError if a request cannot be served.
        """
        return False

    def queued(self, request: GenerateRequest | EmbedRequest) -> None:
        """A request was put into the scheduler's queue."""

    def admitted(self, admission: Admission) -> Admission:
        """Return an admission with what the part did before it for the request."""
        return admission

    def work(self, *, is_quiet: bool) -> Outcome | None:
        """Do a piece of work. Return None if there was nothing to do.

        The loop `is_quiet` if no request runs, waits or arrives, and no part is waiting.
        """
        return None

    def stepped(self, retired: RetiredStep) -> None:
        """The outputs of a step, or only new counts, were sent."""

    def close(self) -> None:
        """The loop has ended."""
