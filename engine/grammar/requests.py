"""ConstrainedRequests: requests wait here until their grammars are compiled."""

from __future__ import annotations

from engine.errors import RequestRejectedError
from engine.grammar.matchers import Matchers
from engine.protocol.generate import Abort, GenerateRequest
from engine.protocol.message import Message
from engine.scheduling.between import Between, Outcome, RetiredStep


class ConstrainedRequests(Between):
    """The part of the loop that compiles grammars and forgets those of finished requests."""

    def __init__(self, matchers: Matchers) -> None:
        self.matchers = matchers

    @property
    def is_waiting(self) -> bool:
        return self.matchers.is_compiling or self.matchers.is_waiting

    def wait(self) -> None:
        self.matchers.wait()

    def handle(self, message: Message) -> bool:
        match message:
            case GenerateRequest() if message.grammar:
                self.matchers.compile(message)
                return True
            case Abort():
                self.matchers.drop(message.ids)
        return False

    def work(self, *, is_quiet: bool) -> Outcome | None:
        ready: list[GenerateRequest] = []
        refused: dict[int, RequestRejectedError] = {}
        for request, error in self.matchers.compiled():
            if error is None:
                ready.append(request)
            else:
                refused[request.id] = error
        return Outcome(ready, refused) if ready or refused else None

    def stepped(self, retired: RetiredStep) -> None:
        self.matchers.drop(output.id for output in retired.outputs if output.finish)

    def close(self) -> None:
        self.matchers.close()
