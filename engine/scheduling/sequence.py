"""Sequence: the engine's mutable record of one request. Owned by the Scheduler alone."""

from __future__ import annotations

from engine.protocol import GenerateRequest, SamplingParams, TokenLogprobs


class Sequence:
    """Tokens, progress and blocks of one request.

    `tokens` are the known ones. `num_tokens` also counts sampled tokens still in flight, so a
    sequence can be scheduled again before its last token has reached the host. `epoch` grows when
    the sequence is preempted or ends, which makes results launched before that stale.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.id: int = request.id
        self.tokens: list[int] = list(request.prompt)
        self.prompt_length: int = len(request.prompt)
        self.params: SamplingParams = request.params
        self.priority: int = request.priority
        self.salt: str = request.salt
        self.source: tuple[int, ...] = tuple(request.source)
        self.prompt_logprobs: list[TokenLogprobs] = []  # of tokens after the first, not told yet
        self.num_scored: int = 0  # tokens of the prompt after the first that have had theirs
        self.num_tokens: int = self.prompt_length
        self.num_computed: int = 0  # tokens whose KV exists or is in flight
        self.tables: list[list[int]] = []  # one per KV group; 0 is a block given back
        self.encode_due: bool = False  # the KV of its source is not there yet
        self.root: bytes = b""  # what its hashes rest on
        self.hashes: list[bytes] = []  # of full blocks of known tokens; grows, never shrinks
        self.num_matched: int = 0  # blocks of each table that the prefix cache had at admission
        self.num_registered: int = 0  # blocks of each table already offered to the prefix cache
        self.was_chunk: bool = False  # its last slice had several tokens
        self.row: int = -1
        self.epoch: int = 0
        self.admitted: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier id (ids grow with arrival)."""
        return (self.priority, self.id)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute next; 0 when only the results of the last launch are missing."""
        if self.num_tokens - self.prompt_length >= self.params.max_tokens:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose logprobs are wanted and not known yet."""
        if self.params.prompt_logprobs < 0:
            return 0
        return self.prompt_length - 1 - self.num_scored

    @property
    def num_needless(self) -> int:
        """How many first tokens need not be computed where their KV is known. The last one's logits
        are what the next sample needs, and each token's tell how likely the one after it was."""
        return self.num_scored if self.num_unscored else len(self.tokens) - 1

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_length
