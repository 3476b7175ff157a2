"""Sequence: the engine's mutable record of one request. Only the Scheduler owns it."""

from __future__ import annotations

from engine.protocol import Explain, GenerateRequest, SamplingParams, TokenLogprobs
from engine.scheduling.step import BlockCopy

MAX_EXPLAINED = 64  # tokens a step: each takes as long as drawing one


class Sequence:
    """Tokens, progress and blocks of one request.

    `tokens` holds the tokens known to the host. `num_tokens` also counts sampled tokens in flight,
    so a sequence can be scheduled again before its last token has reached the host. `epoch`
    increases when the sequence is preempted or ends. Results launched before that are then stale.
    """

    explain: Explain | None = None

    def __init__(self, request: GenerateRequest) -> None:
        self.id: int = request.id
        self.tokens: list[int] = list(request.prompt)
        self.prompt_length: int = len(request.prompt)
        self.params: SamplingParams = request.params
        self.priority: int = request.priority
        self.salt: str = request.salt
        self.encoder_prompt: tuple[int, ...] = tuple(request.encoder_prompt)
        self.prompt_logprobs: list[TokenLogprobs] = []  # of tokens after the first, not sent yet
        self.num_prompt_logprobs: int = 0  # how many are known, sent ones included
        self.num_tokens: int = self.prompt_length
        self.num_computed: int = 0  # tokens whose KV exists or is in flight
        self.tables: list[list[int]] = []  # one per KV group; 0 is a released block
        self.needs_encoding: bool = False  # its source must still be encoded
        self.hash_root: bytes = b""  # parent of its first hash; empty until computed
        self.hashes: list[bytes] = []  # of full blocks of known tokens; grows, never shrinks
        self.num_matched: int = 0  # blocks of each table found in the prefix cache at admission
        self.num_registered: int = 0  # blocks of each table already offered to the prefix cache
        # Hashes of the beginnings of its next block, whose tokens are those of the range.
        self.part_hashes: list[bytes] = []
        self.part_range: tuple[int, int] = (0, 0)
        self.copies: list[BlockCopy] = []  # due before its first slice
        self.last_was_chunk: bool = False  # its last slice had several tokens
        self.row: int = -1
        self.epoch: int = 0
        self.admitted: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower priority value first, then earlier id (ids grow with arrival)."""
        return (self.priority, self.id)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens to compute; 0 if only results of launched steps are missing."""
        if self.num_tokens - self.prompt_length >= self.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Number of prompt tokens whose prompt logprobs are requested and not known yet."""
        if self.params.prompt_logprobs < 0:
            return 0
        return self.prompt_length - 1 - self.num_prompt_logprobs

    @property
    def num_skippable(self) -> int:
        """Number of leading tokens that need not be computed if their KV is cached.

        The next sample needs the logits of the last token. Prompt logprobs need the logits of the
        token before each of them.
        """
        if self.num_missing_prompt_logprobs:
            return self.num_prompt_logprobs
        return len(self.tokens) - 1

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_length


class ExplainedSequence(Sequence):
    """A past answer whose draws are explained: its tokens are known, and computed like a prompt.

    A step explains at most MAX_EXPLAINED of them, so that others do not wait.
    """

    def __init__(self, request: GenerateRequest, explain: Explain) -> None:
        super().__init__(request)
        self.explain = explain
        self._first_explained = explain.first_row(self.prompt_length)

    @property
    def num_skippable(self) -> int:
        return self._first_explained

    @property
    def num_uncomputed(self) -> int:
        most = max(0, self._first_explained - self.num_computed) + MAX_EXPLAINED
        return min(super().num_uncomputed, most)


def sequence_of(request: GenerateRequest) -> Sequence:
    """Return the record of a new request."""
    if request.explain is None:
        return Sequence(request)
    return ExplainedSequence(request, request.explain)
