"""The results of a step, and the refusal of a request."""

from __future__ import annotations

from msgspec import field

from engine.protocol.embed import EmbedOutput
from engine.protocol.generate import FinishReason, TokenLogprobs
from engine.protocol.message import Message, Record


class TokenOutput(Record, frozen=True):
    """One sampled token of a request.

    If its logits or its prompt logprobs are not finite, `token` is -1 and `finish` is "error".
    """

    id: int
    token: int
    finish: FinishReason | None = None  # None: more tokens follow
    logprobs: TokenLogprobs | None = None
    # Only with the first token, if requested: one entry per prompt token after the first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Admission(Record, frozen=True):
    """A request left the waiting queue for the first time."""

    id: int
    at: float  # launch of its first step
    cached_tokens: int  # tokens of prompt and source whose KV came from the prefix cache
    # Its images. It is encoded for this request, or had been for another one and is reused.
    images_encoded: int = 0
    images_reused: int = 0
    images_ready: float = 0.0  # when all embeddings were there; 0.0: it shows no image
    encode_begin: float = 0.0  # of the first unit; 0.0: nothing was encoded
    encode_seconds: float = 0.0  # of all its units together
    encode_units: int = 0


class PrefillChunk(Record, frozen=True):
    """A step computed tokens [start, start + count) of a request.

    They are part of its prompt, or of the tokens it had when it was preempted.
    """

    id: int
    start: int
    count: int


class EngineStats(Record, frozen=True):
    """State of the engine after one step.

    `step`, `preemptions`, `prefix_queries`, `prefix_hits`, `drafts`, `drafted` and `drafted_right`
    are counters: they count from the engine's start and never decrease.
    """

    step: int = 0
    running: int = 0  # requests
    waiting: int = 0  # requests
    blocks_held: int = 0
    blocks_cached: int = 0  # available for allocation, with content that can still be reused
    blocks_total: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of prompts and sources looked up in the prefix cache
    prefix_hits: int = 0  # tokens of prompts and sources found there
    drafts: int = 0  # runs of tokens assumed by speculation
    drafted: int = 0  # tokens of these runs
    drafted_right: int = 0  # those of them that the model sampled
    step_seconds: float = 0.0  # wall time of this step
    step_prefill_tokens: int = 0  # tokens of prompts and of encoded texts
    step_decode_tokens: int = 0  # without drafted ones that were wrong
    # Named measurements of the runner, exported by /metrics.
    gauges: dict[str, float] = field(default_factory=dict)


class StepOutputs(Message, frozen=True):
    """Results of one retired step. Sent without results if only the stats have changed."""

    at: float  # when the results were on the host
    tokens: list[TokenOutput]
    admitted: list[Admission]
    stats: EngineStats
    embeddings: list[EmbedOutput] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)
    # Tokens in the prefix cache, by the id of the CacheLookup.
    lookups: dict[int, int] = field(default_factory=dict)
    num_handled: int = 0  # messages that the engine has taken since its start


class Rejected(Message, frozen=True):
    """The engine refuses one request; `code` is an OpenAI error code."""

    id: int
    code: str
    message: str
    param: str | None = None  # the request's field at fault
