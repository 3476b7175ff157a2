"""Sequence: the engine's mutable record of one request. Only the Scheduler owns it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.protocol.generate import (
    CacheLookup,
    Explain,
    FinishReason,
    GenerateRequest,
    Image,
    SamplingParams,
    TokenLogprobs,
)
from engine.scheduling.drafts import Drafts
from engine.scheduling.step import NO_STATES, BlockCopy, ScheduledSlice, SliceStates


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
        self.tenant: str = request.tenant
        self.turn: int = 0  # see TenantTurns; fixed at its first admission
        self.size: int = request.size
        self.admitted: bool = False
        self.arrival: float = request.arrival
        self.salt: str = request.salt
        self.encoder_prompt: tuple[int, ...] = tuple(request.encoder_prompt)
        self.adapter: int = request.adapter  # 0: none
        self.adapter_slot: int = 0  # while it runs
        # Its KV is that of no request with another one.
        self.ablation_key: tuple[int, ...] = request.ablation.key if request.ablation else ()
        self.images: tuple[Image, ...] = tuple(image.without_pixels for image in request.images)
        self.prompt_logprobs: list[TokenLogprobs] = []  # of tokens after the first, not sent yet
        self.num_prompt_logprobs: int = 0  # how many are known, sent ones included
        self.num_tokens: int = self.prompt_length
        self.num_computed: int = 0  # tokens whose KV exists or is in flight
        self.tables: list[list[int]] = []  # one per KV group; 0 is a released block
        self.states: dict[int, int] = {}  # tokens -> slot of the recurrent state behind them
        self.needs_encoding: bool = False  # its source must still be encoded
        self.hash_root: bytes = b""  # parent of its first hash; empty until computed
        self.hashes: list[bytes] = []  # of full blocks of known tokens; grows, never shrinks
        self.num_cached: int = 0  # tokens found in the prefix cache at its first admission
        self.num_matched: int = 0  # blocks of each table found in the prefix cache at admission
        self.num_registered: int = 0  # blocks of each table already offered to the prefix cache
        # Hashes of the beginnings of its next block, whose tokens are those of the range.
        self.part_hashes: list[bytes] = []
        self.part_range: tuple[int, int] = (0, 0)
        self.copies: list[BlockCopy] = []  # due before its first slice
        self.last_was_chunk: bool = False  # its last slice had several tokens, or a draft
        self.is_constrained: bool = request.grammar is not None
        self.drafts: Drafts = Drafts()
        # The token behind which a draft is in flight, or -1. Nothing else is scheduled meanwhile.
        self.drafted_behind: int = -1
        self.row_is_stale: bool = False  # the row does not know which tokens of a draft were right
        self.row: int = -1
        self.epoch: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: lower priority value, then turn of the tenant, then earlier id."""
        return (self.priority, self.turn, self.id)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens to compute; 0 if only results of launched steps are missing."""
        if self.drafted_behind >= 0 or not self.num_samples_left:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def num_samples_left(self) -> int:
        """Number of tokens that may still be sampled, without those in flight."""
        return max(0, self.params.max_tokens - (self.num_tokens - self.prompt_length))

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

    def image_run_across(self, position: int) -> tuple[int, int] | None:
        """Return the run (first token, end) of an image's tokens that has tokens on both sides of
        the end of `position` tokens; None if there is none."""
        for image in self.images:
            for first, count in image.runs:
                if first < position < first + count:
                    return first, first + count
        return None

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_length

    def slice_at(
        self,
        start: int,
        count: int,
        samples: bool,
        num_prompt_logprobs: int = 0,
        draft: int = -1,
        states: SliceStates = NO_STATES,
    ) -> ScheduledSlice:
        """Return a slice of the running sequence."""
        row, slot, known = self.row, self.adapter_slot, num_prompt_logprobs
        return ScheduledSlice(
            self.id, self.epoch, row, start, count, samples, known, draft, slot, states
        )

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token; return why the sequence ends with it, or None."""
        self.tokens.append(token)
        params = self.params
        outputs = len(self.tokens) - self.prompt_length
        if token in params.stop_token_ids and outputs >= params.min_tokens:
            return "stop"
        return "length" if outputs >= params.max_tokens else None

    def accepts(self, drafted: ScheduledSlice) -> bool:
        """Return whether the drafted token of a slice was right, and count it as computed if so."""
        known = len(self.tokens)
        if known != drafted.start + 1 or self.tokens[-1] != drafted.draft:
            return False
        self.num_computed = known
        self.num_tokens = known + 1
        return True

    def add_prompt_logprobs(self, start: int, found: Seq[TokenLogprobs]) -> None:
        """Add the prompt logprobs of a slice that began at token `start`."""
        known = self.num_prompt_logprobs - start  # from before a preemption
        self.prompt_logprobs += found[known:]
        self.num_prompt_logprobs = len(self.prompt_logprobs)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the prompt logprobs that have not been sent yet, once."""
        if not self.prompt_logprobs:
            return ()
        found = tuple(self.prompt_logprobs)
        self.prompt_logprobs = []
        return found

    def check(self) -> None:
        """Assert the invariants of a running sequence."""
        assert self.num_computed <= self.num_tokens
        assert len(self.tokens) <= self.num_tokens
        assert self.num_outputs < self.params.max_tokens
        assert self.num_missing_prompt_logprobs >= 0
        assert not (self.num_missing_prompt_logprobs and self.num_outputs), (
            "prompt logprob is missing"
        )


class ExplainedSequence(Sequence):
    """A past answer whose draws are explained: its tokens are known, and computed like a prompt.

    A step explains few of them, so that others do not wait long.
    """

    def __init__(self, request: GenerateRequest, explain: Explain) -> None:
        super().__init__(request)
        self.explain = explain
        self._first_explained = explain.first_row(self.prompt_length)
        self._max_per_step = explain.max_per_step

    @property
    def num_skippable(self) -> int:
        return self._first_explained

    @property
    def num_uncomputed(self) -> int:
        num_before = max(0, self._first_explained - self.num_computed)
        return min(super().num_uncomputed, num_before + self._max_per_step)


def sequence_of(request: GenerateRequest) -> Sequence:
    """Return the record of a new request."""
    if request.explain is None:
        return Sequence(request)
    return ExplainedSequence(request, request.explain)


def sequence_of_lookup(lookup: CacheLookup) -> Sequence:
    """Return the record of a request with the prompt of a lookup."""
    params = SamplingParams(max_tokens=1)
    return Sequence(
        GenerateRequest(
            lookup.id,
            lookup.prompt,
            params,
            arrival=0.0,
            salt=lookup.salt,
            encoder_prompt=lookup.encoder_prompt,
            adapter=lookup.adapter,
            images=lookup.images,
        )
    )
