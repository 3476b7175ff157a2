"""Scheduler: decides what each step computes. It handles tokens and blocks, but no tensors.

There is no prefill phase and no decode phase. Each step has one token budget, under which the
computed tokens of sequences catch up with their known tokens. Running sequences come first, then
waiting ones in order of priority, turn of the tenant and arrival. A prompt longer than the
remaining budget is computed in chunks, which leave a part of the budget to shorter prompts. If
blocks run out, the lowest-ranked running sequence is preempted: its blocks are released, and it is
recomputed later.

`num_computed` advances when a slice is scheduled, not when its results arrive, so the next step can
be scheduled while this one runs. `retire` drops results that have become stale (see `epoch`).
"""

from __future__ import annotations

import bisect
import math
import os
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import CacheLookup, FinishReason, GenerateRequest, TokenLogprobs
from engine.protocol.outputs import EngineStats, PrefillChunk, TokenOutput
from engine.protocol.ready import KVGroup
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.block_pool import BlockHasher, BlockPool
from engine.scheduling.block_tables import BlockTables, States
from engine.scheduling.embed_queue import EmbedQueue
from engine.scheduling.limits import check_embedding, check_generation
from engine.scheduling.prefill_fairness import step_budget, tokens_for_others
from engine.scheduling.sequence import Sequence, sequence_of, sequence_of_lookup
from engine.scheduling.speculation import Drafter, Grammars, Speculation
from engine.scheduling.step import NO_STATES, SampledToken, Step
from engine.scheduling.step_builder import StepBuilder
from engine.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Owns all sequences, rows and blocks of an engine.

    `block_size`, budgets and limits are in tokens, `num_blocks` in blocks. `add` raises
    RequestRejectedError for requests that can never run. The client limits the queue. Images of up
    to `image_tokens` are computed whole, if need be beyond the budget; with 0 chunks may cut them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_encoder_tokens: int = 1 << 30,
        image_tokens: int = 0,
        context_cost: float = 0.0,
        groups: Seq[KVGroup] = (KVGroup(1),),
        prefix_caching: bool = True,
        part_size: int = 0,
        hash_key: bytes | None = None,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
        num_adapter_slots: int = 0,
        states: States | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_encoder_tokens, self.image_tokens = max_num_encoder_tokens, image_tokens
        self.context_cost = context_cost  # see step_budget
        self.pool = BlockPool(num_blocks)
        hasher = BlockHasher(block_size, hash_key or os.urandom(16)) if prefix_caching else None
        most = max_num_batched_tokens + image_tokens
        self.tables = BlockTables(self.pool, hasher, groups, block_size, most, part_size, states)
        # Blocks left free at admission, so that it does not cause a preemption in the next step.
        self.watermark = max(1, num_blocks // 100)
        self.adapters = AdapterSlots(num_adapter_slots)
        self.waiting = WaitingQueue(self.adapters)
        self.running: list[Sequence] = []  # sorted by rank
        self.sequences: dict[int, Sequence] = {}
        self.embeds = EmbedQueue()
        self.speculation = Speculation(self.tables, drafter, grammars)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._steps = self._preemptions = 0

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: GenerateRequest | EmbedRequest) -> None:
        """Queue a request. Raises RequestRejectedError with the limits if it can never run."""
        if isinstance(request, EmbedRequest):
            check_embedding(request, self.max_model_len)
            self.embeds.add(request)
            return
        check_generation(request, self.tables, self.max_model_len)
        assert request.id not in self.sequences, "request ids are never reused"
        sequence = sequence_of(request)
        self.sequences[sequence.id] = sequence
        self.waiting.add(sequence)

    def num_cached(self, lookup: CacheLookup) -> int:
        """Return how many tokens of prompt and source would come from the prefix cache now."""
        self.tables.begin_step()  # the request would be admitted in a later step
        return self.tables.num_cached_in_all(sequence_of_lookup(lookup))

    def abort(self, ids: Iterable[int]) -> None:
        """Remove these requests; unknown ids are ignored."""
        ids = set(ids)
        self.embeds.abort(ids)
        for request_id in ids & self.sequences.keys():
            self._remove(self.sequences[request_id])

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self.embeds)

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Return the next step, or None if there is nothing to launch now."""
        self.tables.begin_step()
        running = [(sequence, sequence.num_uncomputed) for sequence in self.running]
        budget = step_budget(running, self.max_num_batched_tokens, self.context_cost)
        builder = StepBuilder(budget, self.max_num_encoder_tokens, self.image_tokens)
        texts = self.embeds.take(self.max_num_encoder_tokens)
        builder.encoder_inputs += texts
        self.waiting.admitted += [(text.id, 0) for text in texts]
        preemptions = self._preemptions
        self._schedule_running(builder, running)
        # After a preemption no sequence is admitted: it would be preempted in the next step.
        if self._preemptions == preemptions:
            self._admit_waiting(builder)
        else:
            self.waiting.refuse("preemption")
        step = builder.build()
        self._steps += step is not None
        return step

    def _schedule_running(self, builder: StepBuilder, running: Seq[tuple[Sequence, int]]) -> None:
        """Schedule running sequences, given with their numbers of uncomputed tokens."""
        # A chunk leaves one token to each decode; the oldest sequence gets at least one. There may
        # be more decodes than the budget only after some have waited for results of their drafts.
        decodes = [due for _, due in running].count(1)
        self.speculation.begin_step(decodes)
        for place, (sequence, due) in enumerate(running, 1):
            if due == 1:
                decodes -= 1
            reserved = decodes * (due > 1)
            count = min(due, max(int(place == 1), builder.budget - reserved))
            if not count or not self._can_run(builder, sequence):
                continue
            if count < due:
                count = self._cut(builder, sequence, count, self.running[place:])
            draft: Seq[int] = ()
            if due == 1:
                draft = self.speculation.draft(sequence, builder.budget - decodes - 1)
            # A decode within a block allocates nothing, and releases blocks only after a chunk.
            is_within_block = sequence.num_computed % self.block_size > 0
            if count > 1 or draft or sequence.last_was_chunk or not is_within_block:
                if not self._make_room(sequence, count):
                    return  # it was the lowest-ranked and is preempted itself
                builder.add_blocks(self.tables.extend(sequence, count))
            self._take(builder, sequence, count)
            if draft or sequence.row_is_stale:
                self.speculation.take(builder, sequence, draft, spare=len(self.running))

    def _can_run(self, builder: StepBuilder, sequence: Sequence) -> bool:
        if sequence.row < 0 or not builder.has_image_budget(sequence):
            return False  # preempted by an earlier one, or an earlier image exceeds the budget
        return self.speculation.is_ready(sequence)  # it awaits no results, and no grammar

    def _admit_waiting(self, builder: StepBuilder) -> None:
        while builder.budget:
            sequence = self._admit(builder)
            if sequence is None:
                return
            due = sequence.num_uncomputed
            count = min(due, builder.budget)
            if count < due:
                count = self._cut(builder, sequence, count, ())
            if sequence.needs_encoding:
                builder.add_encoder_prompt(sequence, self.tables.cross_groups)
            self.tables.extend(sequence, count)
            builder.add_row(sequence, self.tables.fresh(sequence))
            self._take(builder, sequence, count)
        self.waiting.refuse("budget")

    def _cut(self, builder: StepBuilder, prompt: Sequence, most: int, behind: Seq[Sequence]) -> int:
        """Return how many of `most` tokens a prompt too long for its step takes.

        The rest goes to sequences that run `behind` it and to waiting ones that can be admitted.
        See StepBuilder.with_whole_images for when it is more than `most`.
        """
        builder.cut_prompts.append(prompt)
        waiting = self.waiting.admissible(len(self._free_rows), self.pool.num_available)
        # One that fits into a step of its own delays the others by that step at most. Sharing would
        # only leave many prompts half computed.
        is_own_turn = self._steps % 2 > 0 or prompt.num_uncomputed <= self.max_num_batched_tokens
        left = tokens_for_others(
            prompt, most, behind, waiting, self.tables, is_own_turn=is_own_turn
        )
        return builder.with_whole_images(prompt, most - left, most)

    def _take(self, builder: StepBuilder, sequence: Sequence, count: int) -> None:
        """Schedule the next `count` tokens of a sequence, whose blocks are allocated."""
        start = sequence.num_computed
        num_prompt_logprobs = 0
        if start < sequence.prompt_length or count > 1:
            builder.prefills.append(PrefillChunk(sequence.id, start, count))
            if sequence.num_missing_prompt_logprobs:
                num_prompt_logprobs = max(0, min(count, sequence.prompt_length - 1 - start))
        sequence.num_computed += count
        sequence.last_was_chunk = count > 1
        samples = sequence.num_computed == sequence.num_tokens
        if samples:
            sequence.num_tokens += 1
        states = NO_STATES
        if self.tables.states is not None:
            states = self.tables.states.take(sequence, start, count)
        if count > 1 or not sequence.num_computed % self.block_size:
            self.tables.register(sequence)
        part = sequence.slice_at(start, count, samples, num_prompt_logprobs, states=states)
        builder.add_slice(part)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt sequences from the lowest rank until `count` tokens fit.

        Returns False if that preempts `sequence` itself.
        """
        self.tables.release_unseen(sequence)
        needed = self.tables.num_missing(sequence, count)
        while self.pool.num_available < needed:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, builder: StepBuilder) -> Sequence | None:
        """Admit the first waiting sequence with blocks for all its tokens; return it, or None.

        The queue behind it waits too, so that long prompts do not starve.
        """
        sequence = self.waiting.first()
        if sequence is None or not self._open(builder, sequence):
            return None
        self.waiting.admit(sequence)
        sequence.row = self._free_rows.pop()
        sequence.adapter_slot = self.adapters.hold(sequence.adapter)
        bisect.insort(self.running, sequence, key=lambda s: s.rank)
        return sequence

    def _open(self, builder: StepBuilder, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks, or note why it waits and return False."""
        if not self._free_rows:
            self.waiting.refuse("rows")
            return False
        lacking = builder.lacking_budget(sequence)
        if lacking:
            self.waiting.refuse(lacking)
            return False
        for prompt in builder.cut_prompts:
            # It could reuse the next block of a prompt that runs in chunks.
            if self.tables.shares_next_block(sequence, prompt):
                self.waiting.refuse_for_prefix(prompt.id)
                return False
        computing = self.tables.state_computed_by(sequence)
        if computing is not None:
            self.waiting.refuse_for_prefix(computing)
            return False
        spare = self.watermark if self.running else 0
        needed = self.tables.open(sequence, spare)
        if needed:
            self.waiting.refuse_for_blocks(sequence, needed, self.pool.num_available)
            return False
        return True

    # ---- results -----------------------------------------------------------------------------

    def retire(
        self,
        step: Step,
        sampled: Iterable[SampledToken],
        prompt_logprobs: Seq[Seq[TokenLogprobs]] = (),
    ) -> list[TokenOutput]:
        """Apply the results of `step` and return its outputs.

        `sampled` has one SampledToken per slice that samples, in order. Those behind a wrong token
        of a draft are dropped. `prompt_logprobs` has those of each slice that computes some.
        """
        if prompt_logprobs:
            self._take_prompt_logprobs(step, prompt_logprobs)
        outputs: list[TokenOutput] = []
        sampling = [s for s in step.slices if s.samples]
        for scheduled, result in zip(sampling, sampled, strict=True):
            sequence = self.sequences.get(scheduled.id)
            if sequence is None or sequence.epoch != scheduled.epoch:
                continue  # aborted or preempted since
            if self.speculation.confirms(sequence, scheduled):
                outputs.append(self._retire_token(sequence, result))
        self.speculation.end_step()
        return outputs

    def _retire_token(self, sequence: Sequence, sampled: SampledToken) -> TokenOutput:
        token = sampled.token
        logprobs = sequence.take_prompt_logprobs()
        if any(math.isnan(entry.logprob) for entry in logprobs):
            token = -1
        finish: FinishReason | None = "error"
        if token >= 0:
            finish = sequence.append(token)
            if not len(sequence.tokens) % self.block_size:
                self.tables.register(sequence)
        if sampled.is_cut and finish == "stop":
            finish = "length"
        if finish == "error":
            self.tables.forget(sequence)  # its blocks may contain NaN
        if finish is not None:
            self._remove(sequence)
        return TokenOutput(sequence.id, token, finish, sampled.logprobs, logprobs)

    def _take_prompt_logprobs(self, step: Step, found: Seq[Seq[TokenLogprobs]]) -> None:
        slices = [s for s in step.slices if s.num_prompt_logprobs]
        for scheduled, logprobs in zip(slices, found, strict=True):
            sequence = self.sequences.get(scheduled.id)
            if sequence is not None and sequence.epoch == scheduled.epoch:
                sequence.add_prompt_logprobs(scheduled.start, logprobs)

    # ---- leaving the running sequences -------------------------------------------------------

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tables.close(sequence)
        self.adapters.release(sequence.adapter)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.epoch += 1
        sequence.drafted_behind, sequence.row_is_stale = -1, False

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.note("preempt", sequence.id)
        self._release(sequence)
        sequence.num_computed = sequence.num_registered = 0
        sequence.num_tokens = len(sequence.tokens)  # tokens in flight are resampled identically
        self.waiting.add(sequence)
        self._preemptions += 1

    def _remove(self, sequence: Sequence) -> None:
        self.pool.note("end", sequence.id)
        del self.sequences[sequence.id]
        self.waiting.leave(sequence)
        if sequence.row >= 0:
            self._release(sequence)

    # ---- stats and invariants ----------------------------------------------------------------

    def stats(
        self,
        step: Step | None = None,
        seconds: float = 0.0,
        gauges: dict[str, float] | None = None,
    ) -> EngineStats:
        """Return the stats after `step`, if any, which took `seconds`."""
        prefill = step.num_tokens - step.num_decode_tokens if step else 0
        decode = step.num_decode_tokens - self.speculation.num_wrong if step else 0
        return EngineStats(
            step=self._steps,
            running=len(self.running) + len(self.embeds.in_flight),
            waiting=len(self.waiting) + len(self.embeds.waiting),
            blocks_held=self.pool.num_held,
            blocks_cached=self.pool.num_cached,
            blocks_total=self.pool.num_blocks,
            preemptions=self._preemptions,
            prefix_queries=self.waiting.prefix_queries,
            prefix_hits=self.waiting.prefix_hits,
            drafts=self.speculation.num_drafts,
            drafted=self.speculation.num_drafted,
            drafted_right=self.speculation.num_accepted,
            step_seconds=seconds,
            step_prefill_tokens=prefill,
            step_decode_tokens=decode,
            gauges=gauges or {},
        )

    def check(self) -> None:
        """Assert all invariants. Tests call it after each operation."""
        self.tables.check(self.running)
        rows = [s.row for s in self.running]
        assert sorted([*rows, *self._free_rows]) == list(range(self.max_num_seqs)), "rows"
        self.waiting.check(self.sequences.values())
        self.adapters.check(Counter(s.adapter for s in self.running if s.adapter))
        ranks = [s.rank for s in self.running]
        assert ranks == sorted(ranks), "order of the running sequences"
        assert {s.id for s in (*self.waiting, *self.running)} == self.sequences.keys()
        assert len(self.waiting) + len(self.running) == len(self.sequences), "a duplicate sequence"
        for sequence in self.running:
            sequence.check()
