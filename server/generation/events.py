"""Events: the answers to one request as they grow, independent of any API.

`Choice` makes them from tokens, and the `Writer` of an API turns them into bytes. A new kind of
event is a dataclass here, a member of `Event`, and a method of each writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.protocol.generate import TokenLogprobs
from server.text.deltas import ReasoningDelta as ReasoningDelta
from server.text.deltas import ToolCallDelta as ToolCallDelta

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenWithLogprobs:
    """A token of a text with its logprobs, and the number of characters before it."""

    token: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt, which has none
    offset: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of all prompt tokens but the first. Comes once, before any text."""

    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next text of a choice, and the tokens that arrived with it.

    The text may lack the last characters of the tokens: an unfinished character, or the possible
    start of a stop string, comes with a later delta. `logprobs` is empty unless requested.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenWithLogprobs]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice.

    "stop" is a stop string or an end token, "length" the token limit, also within a call.
    "tool_calls" is an end after at least one complete call.
    """

    reason: FinishReason
    stop: str | None = None  # the stop string that ended the answer


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a choice's prompt is computed. Comes before any text, if requested."""

    total: int
    cached: int  # tokens that the prefix cache held
    processed: int  # with the cached ones
    prompt_ms: float  # since the first step began


Event = PromptProgress | PromptLogprobs | ReasoningDelta | TextDelta | ToolCallDelta | Finish


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went so far, over all prompts and choices."""

    queue_ms: float  # until a first choice left the queue
    cached_tokens: int  # prompt tokens that the prefix cache held
    prompt_tokens: int  # the other ones, which were computed
    prompt_ms: float  # from there to the first token of an answer
    generated_tokens: int
    generation_ms: float  # from the first token to the last
    timed_tokens: int  # those that it took: all but the first of each answer


@dataclass(frozen=True, slots=True)
class ChoiceEvents:
    """Events of one choice that arrived together, in the order of the model's text.

    Prompt logprobs come first, and the end comes last. One TextDelta has all tokens of the update.
    """

    index: int
    events: Sequence[Event]
    timings: Timings | None = None  # if requested


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens of one request, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache held
    reasoning_tokens: int = 0  # completion tokens before the answer
    timings: Timings | None = None  # with --enable-per-request-metrics
