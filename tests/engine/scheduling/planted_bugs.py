"""Bugs to plant into the scheduler, which show that its tests detect them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scheduling import block_tables as tables
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.block_pool import BlockHasher, BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import Speculation
from engine.scheduling.state_slots import StateSlots
from engine.scheduling.step import ScheduledSlice, SliceStates
from engine.scheduling.step_builder import StepBuilder

Plant = Callable[[pytest.MonkeyPatch], None]


def wrong_drafts_are_accepted(patch: pytest.MonkeyPatch) -> None:
    def accepts(self: Sequence, drafted: ScheduledSlice) -> bool:
        if len(self.tokens) > drafted.start:
            self.tokens[drafted.start] = drafted.draft
        return original(self, drafted)

    original = Sequence.accepts
    patch.setattr(Sequence, "accepts", accepts)


def kv_of_wrong_drafts_stays(patch: pytest.MonkeyPatch) -> None:
    """The last token counts as computed, although its KV may be that of a wrong draft."""

    def confirms(self: Speculation, sequence: Sequence, scheduled: ScheduledSlice) -> bool:
        found = original(self, sequence, scheduled)
        if not found and sequence.num_computed == len(sequence.tokens) - 1:
            sequence.num_computed += 1
            sequence.num_tokens += 1
        return found

    original = Speculation.confirms
    patch.setattr(Speculation, "confirms", confirms)


def stale_results_are_taken(patch: pytest.MonkeyPatch) -> None:
    def release(self: Scheduler, sequence: Sequence) -> None:
        original(self, sequence)
        sequence.epoch -= 1

    original = Scheduler._release
    patch.setattr(Scheduler, "_release", release)


def blocks_are_kept_after_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", lambda self, blocks: None)


def blocks_are_released_twice(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release

    def release(self: BlockPool, blocks: list[int]) -> None:
        original(self, blocks)
        original(self, blocks)

    patch.setattr(BlockPool, "release", release)


def tenants_share(patch: pytest.MonkeyPatch) -> None:
    original = BlockHasher.extend
    patch.setattr(
        BlockHasher,
        "extend",
        lambda self, hashes, tokens, root, images: original(self, hashes, tokens, b"", images),
    )


def blocks_are_found_before_their_tokens_are_known(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.register

    def register(self: BlockTables, sequence: Sequence) -> None:
        sequence.num_computed += 1
        original(self, sequence)
        sequence.num_computed -= 1

    patch.setattr(BlockTables, "register", register)


def tables_are_one_block_short(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.extend
    patch.setattr(
        BlockTables, "extend", lambda self, sequence, count: original(self, sequence, count - 1)
    )


def windows_give_back_a_block_too_much(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.release_unseen

    def release_unseen(self: BlockTables, sequence: Sequence) -> None:
        sequence.num_computed += self.block_size
        original(self, sequence)
        sequence.num_computed -= self.block_size

    patch.setattr(BlockTables, "release_unseen", release_unseen)


def windows_keep_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "release_unseen", lambda self, sequence: None)


def groups_find_each_others_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tables, "cache_key", lambda digest, group: digest)


def sources_are_shared_by_tenants(patch: pytest.MonkeyPatch) -> None:
    original = BlockHasher.root
    patch.setattr(BlockHasher, "root", lambda self, salt, source: original(self, "", source))


def a_source_found_is_scrubbed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockTables,
        "fresh",
        lambda self, s: [b for table in s.tables for b in table[s.num_registered :]],
    )


def parts_are_copied_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(set[int]):
        def add(self, block: int) -> None:
            pass

    def begin_step(self: BlockTables) -> None:
        self._just_registered = Forgetful()

    patch.setattr(BlockTables, "begin_step", begin_step)


def parts_are_found_for_all_tenants(patch: pytest.MonkeyPatch) -> None:
    original = BlockHasher.parts
    patch.setattr(
        BlockHasher,
        "parts",
        lambda self, tokens, size, parent, *shown: original(self, tokens, size, b"", *shown),
    )


def images_are_known_by_their_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockHasher, "_shows", lambda self, parent, images, start, end: parent)


def images_are_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBuilder, "with_whole_images", lambda self, prompt, count, most: count)


def every_image_exceeds_the_budget(patch: pytest.MonkeyPatch) -> None:
    original = StepBuilder.with_whole_images

    def with_whole_images(self: StepBuilder, prompt: Sequence, count: int, most: int) -> int:
        self.image_budget = self.image_tokens
        return original(self, prompt, count, most)

    patch.setattr(StepBuilder, "with_whole_images", with_whole_images)
    patch.setattr(StepBuilder, "lacking_budget", lambda self, waiting: "")


def copies_are_scrubbed(patch: pytest.MonkeyPatch) -> None:
    original = BlockTables.fresh

    def fresh(self: BlockTables, sequence: Sequence) -> list[int]:
        return original(self, sequence) + [copy.target for copy in sequence.copies]

    patch.setattr(BlockTables, "fresh", fresh)


def evicted_parts_are_found(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.register

    class Kept(dict[bytes, int]):
        def __delitem__(self, part: bytes) -> None:
            pass

    def register(self: BlockPool, block: int, digest: bytes, parts: tuple[bytes, ...] = ()) -> None:
        if not isinstance(self._block_with, Kept):
            self._block_with = Kept(self._block_with)
        original(self, block, digest, parts)

    patch.setattr(BlockPool, "register", register)
    patch.setattr(BlockPool, "check", lambda self, tables: None)


def evicted_blocks_keep_their_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "forget", lambda self, block: None)


def tokens_in_flight_survive_a_preemption(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        in_flight = sequence.num_tokens
        original(self, sequence)
        sequence.num_tokens = in_flight

    patch.setattr(Scheduler, "_preempt", preempt)


def the_oldest_is_preempted(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: Scheduler, sequence: Sequence, count: int) -> bool:
        self.tables.release_unseen(sequence)
        while self.pool.num_available < self.tables.missing(sequence, count):
            victim = self.running[0]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    patch.setattr(Scheduler, "_make_room", make_room)


def answers_run_past_their_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "num_uncomputed", property(lambda s: s.num_tokens - s.num_computed))


def prompts_with_logprobs_are_taken_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "num_skippable", property(lambda s: len(s.tokens) - 1))


def prompt_logprobs_are_computed_again_after_preemption(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        original(self, sequence)
        sequence.num_prompt_logprobs //= 2

    patch.setattr(Scheduler, "_preempt", preempt)


def adapters_share(patch: pytest.MonkeyPatch) -> None:
    original = BlockHasher.root
    patch.setattr(
        BlockHasher, "root", lambda self, salt, source, adapter: original(self, salt, source)
    )


def used_adapters_leave(patch: pytest.MonkeyPatch) -> None:
    """Adapters leave in order of their loads, whether sequences use them or not."""

    def take_slot(self: AdapterSlots) -> int:
        if self._free or not self._resident:
            return original(self)
        return self._resident.pop(next(iter(self._resident)))

    original = AdapterSlots.take_slot
    patch.setattr(AdapterSlots, "take_slot", take_slot)


def adapters_are_used_before_they_are_loaded(patch: pytest.MonkeyPatch) -> None:
    def hold(self: AdapterSlots, adapter: int) -> int:
        return original(self, adapter) if adapter in self._resident or not adapter else 1

    original = AdapterSlots.hold
    patch.setattr(AdapterSlots, "hold", hold)
    patch.setattr(AdapterSlots, "is_resident", lambda self, adapter: True)


def prefixes_are_found_without_their_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "num_kept", lambda self, hashes: len(hashes))


def states_are_read_while_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    original = StateSlots.register

    def register(self: StateSlots, sequence: Sequence, blocks: int) -> None:
        original(self, sequence, blocks)
        self._coming.clear()

    patch.setattr(StateSlots, "register", register)


def snapshots_are_updated_in_place(patch: pytest.MonkeyPatch) -> None:
    original = StateSlots.take

    def take(
        self: StateSlots, sequence: Sequence, start: int, count: int, *, is_draft: bool = False
    ) -> SliceStates:
        read, writes = original(self, sequence, start, count, is_draft=is_draft)
        if not read or is_draft or count > 1:
            return read, writes
        return read, ((0, read),)

    patch.setattr(StateSlots, "take", take)


def wrong_drafts_advance_the_state(patch: pytest.MonkeyPatch) -> None:
    original = StateSlots.take

    def take(
        self: StateSlots, sequence: Sequence, start: int, count: int, *, is_draft: bool = False
    ) -> SliceStates:
        if is_draft:
            slot = sequence.states[start]
            sequence.states[start + count] = slot
            return slot, ((0, slot),)
        return original(self, sequence, start, count, is_draft=False)

    patch.setattr(StateSlots, "take", take)
    patch.setattr(StateSlots, "check", lambda self, sequences: None)


def states_of_ended_sequences_stay_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateSlots, "close", lambda self, sequence: None)


PLANTED: tuple[Plant, ...] = (
    prefixes_are_found_without_their_state,
    states_are_read_while_they_are_computed,
    snapshots_are_updated_in_place,
    wrong_drafts_advance_the_state,
    states_of_ended_sequences_stay_held,
    stale_results_are_taken,
    blocks_are_kept_after_the_end,
    blocks_are_released_twice,
    tenants_share,
    blocks_are_found_before_their_tokens_are_known,
    tables_are_one_block_short,
    windows_give_back_a_block_too_much,
    windows_keep_everything,
    groups_find_each_others_blocks,
    sources_are_shared_by_tenants,
    a_source_found_is_scrubbed,
    parts_are_copied_before_they_are_computed,
    parts_are_found_for_all_tenants,
    images_are_known_by_their_tokens,
    images_are_cut,
    every_image_exceeds_the_budget,
    copies_are_scrubbed,
    evicted_parts_are_found,
    evicted_blocks_keep_their_names,
    tokens_in_flight_survive_a_preemption,
    the_oldest_is_preempted,
    answers_run_past_their_last_token,
    prompts_with_logprobs_are_taken_from_the_cache,
    prompt_logprobs_are_computed_again_after_preemption,
    wrong_drafts_are_accepted,
    kv_of_wrong_drafts_stays,
    adapters_share,
    used_adapters_leave,
    adapters_are_used_before_they_are_loaded,
)
