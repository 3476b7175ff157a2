"""Writer: the interface between a generation and the API that its client speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from server.generation.events import ChoiceEvents, PromptLogprobs, TextDelta, Usage
from server.generation.off_loop import off_loop
from server.generation.options import GenerationOptions
from server.http.errors import ApiError

PING = b": ping\n\n"  # a comment, which clients skip
CHARS_PER_LOGPROB = 8  # of a text that takes as long to tokenise as a logprob to format


class Writer(Protocol):
    """Formats the events of one generation for one API.

    A stream consists of `opening`, the `chunks` of each choice whenever events are ready, and
    `closing`. If it fails, `failure` takes the place of the rest. `whole` is the answer without a
    stream, made from the same events. A call may run in a thread, but only one at a time.
    """

    def opening(self) -> bytes:
        """Return the bytes before any event, or none."""

    def chunks(self, update: ChoiceEvents) -> bytes:
        """Return the bytes of events, or none if they change nothing that the client sees."""

    def ping(self) -> bytes:
        """Return the bytes that keep a silent stream alive. They begin with `:` or a space."""

    def closing(self, usage: Usage) -> bytes:
        """Return the last bytes of a complete stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that failed after its status was sent."""

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        """Return the JSON of an answer that is not streamed. `answers` has one item per choice."""


async def format_events(
    options: GenerationOptions, updates: Sequence[ChoiceEvents], write: Callable[[], bytes]
) -> bytes:
    """Return `write()`, which formats `updates`. Many logprobs are formatted in a thread."""
    alternatives = max(options.num_logprobs, options.num_prompt_logprobs)
    if alternatives < 0:
        return write()
    tokens = sum(map(_num_tokens_with_logprobs, updates))
    return await off_loop(CHARS_PER_LOGPROB * (alternatives + 2) * tokens, write)


def _num_tokens_with_logprobs(update: ChoiceEvents) -> int:
    tokens = 0
    for event in update.events:
        match event:
            case TextDelta() | PromptLogprobs():
                tokens += len(event.logprobs)
    return tokens
