"""BlockTables: maps the tokens of each sequence to blocks of the pool, per KV group.

A sequence has one block table per KV group. Entry j is the block that starts at token
j * block_size. It is 0 if no later query sees that block, so the group released or never allocated
it. The bookkeeping is exact: methods decide whether there are enough blocks before they take any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from engine.protocol.journal import BlockEvent
from engine.protocol.ready import KVGroup
from engine.scheduling.block_pool import BlockHasher, BlockPool, cache_key
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import BlockCopy, NewBlocks, SliceStates


class Match(NamedTuple):
    """The beginning of a sequence that is in the prefix cache."""

    blocks: int  # whole blocks
    tables: list[list[int]]  # these blocks, per KV group
    part: int = 0  # tokens behind them that the first tokens of other blocks equal
    sources: Seq[int] = ()  # those blocks, one per group of the sequence's own tokens


class States(Protocol):
    """The states of recurrent layers: `state_slots.py`, which says what each method does."""

    def begin_step(self) -> None: ...
    def num_kept(self, hashes: Seq[bytes]) -> int: ...
    def computed_by(self, hashes: Seq[bytes]) -> int | None: ...
    def open(self, sequence: Sequence, blocks: int) -> None: ...
    def take(
        self, sequence: Sequence, start: int, count: int, *, is_draft: bool = False
    ) -> SliceStates: ...
    def register(self, sequence: Sequence, blocks: int) -> None: ...
    def forget(self, sequence: Sequence) -> None: ...
    def close(self, sequence: Sequence) -> None: ...
    def check(self, sequences: Collection[Sequence]) -> None: ...


class BlockTables:
    """The block tables of all sequences. A step computes at most `step_tokens` tokens.

    With a `part_size`, a sequence whose next block begins like a cached one takes a copy of that
    beginning, in multiples of this many tokens. With 0 it computes them.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher | None,
        groups: Seq[KVGroup],
        block_size: int,
        step_tokens: int,
        part_size: int = 0,
        states: States | None = None,
    ) -> None:
        self.pool = pool
        self.hasher = hasher  # None: prefixes are not shared
        self.groups = groups
        self.block_size = block_size
        self.step_tokens = step_tokens
        self.states = states  # None: no layer has one
        self.part_size = 0 if states else part_size  # no state is kept inside a block
        self._just_registered: set[int] = set()  # blocks whose KV the step in the making computes
        numbered = list(enumerate(groups))
        # Groups that keep the sequence's own tokens, by number and group; and the cross groups.
        self._own = [(number, group) for number, group in numbered if not group.is_cross]
        self.cross_groups = [number for number, group in numbered if group.is_cross]
        # Each gets a sequence and the index of a block of it that has become findable.
        self.observers: list[Callable[[Sequence, int], None]] = []

    def max_blocks(self, tokens: int, source_tokens: int = 0) -> int:
        """Return the most blocks that a sequence of `tokens` holds at once."""
        blocks = 0
        for group in self.groups:
            length = source_tokens if group.is_cross else tokens
            blocks += group.max_blocks(length, self.step_tokens, self.block_size)
        return blocks

    def open(self, sequence: Sequence, spare: int) -> int:
        """Hold the cached blocks of a waiting sequence and allocate blocks for its other tokens.

        Groups with a window allocate their blocks chunk by chunk instead. All known tokens must be
        computable with `spare` blocks left over. Otherwise the sequence holds nothing, and this
        returns how many blocks must be available; it returns 0 if it has opened the sequence.
        """
        num_tokens, num_source = len(sequence.tokens), len(sequence.encoder_prompt)
        match = self._matched(sequence)
        tables = match.tables
        self._match_source(sequence, tables)
        found = [block for table in tables for block in table if block]
        missing = self.max_blocks(num_tokens, num_source) - len(found)
        needed = missing + spare + self.pool.num_idle(found)
        if needed > self.pool.num_available:
            return needed
        self.pool.hold(found)
        for group, table in zip(self.groups, tables, strict=True):
            if group.window is None:
                length = num_source if group.is_cross else num_tokens
                table += self.pool.allocate(self._num_blocks(length) - len(table))
            elif match.part:
                table += self.pool.allocate(1)
        sequence.tables = tables
        if self.states is not None:
            self.states.open(sequence, match.blocks)
        if self.pool.journal is not None:
            self._note_open(sequence, self.pool.journal)
        sequence.num_computed = match.blocks * self.block_size + match.part
        sequence.num_matched = match.blocks
        sequence.num_registered = match.blocks
        if match.part:
            for (number, _), source in zip(self._own, match.sources, strict=True):
                target = tables[number][match.blocks]
                sequence.copies.append(BlockCopy(source, target, match.part, number))
            self.release_unseen(sequence)  # a query behind the part sees fewer blocks
        self._register_source(sequence)
        return 0

    def _note_open(self, sequence: Sequence, journal: list[BlockEvent]) -> None:
        taken = [(number, tuple(table)) for number, table in enumerate(sequence.tables) if table]
        journal += [BlockEvent("take", sequence.id, number, 0, table) for number, table in taken]

    def _num_blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def num_uncomputed(self, sequence: Sequence) -> int:
        """Return the number of tokens to compute, without the cached ones of a waiting sequence."""
        if sequence.row >= 0:
            return sequence.num_uncomputed
        return sequence.num_uncomputed - self.num_cached(sequence)

    def num_cached(self, sequence: Sequence) -> int:
        """Return the number of leading tokens of a waiting sequence that need not be computed."""
        match = self._matched(sequence)
        return match.blocks * self.block_size + match.part

    def num_cached_in_all(self, sequence: Sequence) -> int:
        """Like `num_cached`, with the tokens of the source if it need not be encoded."""
        cached = self.num_cached(sequence)
        self._match_source(sequence, [[] for _ in self.groups])
        return cached if sequence.needs_encoding else cached + len(sequence.encoder_prompt)

    def shares_next_block(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether `waiting` could reuse the next block that `running` computes."""
        index = running.num_computed // self.block_size
        self._hash(waiting)
        num_findable = waiting.num_skippable // self.block_size
        if index >= min(num_findable, len(waiting.hashes), len(running.hashes)):
            return False
        return waiting.hashes[index] == running.hashes[index]

    def _matched(self, sequence: Sequence) -> Match:
        """Return the leading tokens of a waiting sequence that need not be computed."""
        self._hash(sequence)
        tables = self._match(sequence.hashes[: sequence.num_skippable // self.block_size])
        blocks = max(map(len, tables))
        if not self.part_size or self.hasher is None:
            return Match(blocks, tables)
        return Match(blocks, tables, *self._match_part(sequence, blocks))

    def _match_part(self, sequence: Sequence, blocks: int) -> tuple[int, Seq[int]]:
        """Return how many tokens behind `blocks` whole ones other blocks begin with, and those."""
        begin = blocks * self.block_size
        end = min(sequence.num_skippable, begin + self.block_size - 1)
        # Queued sequences are looked up in many steps.
        if sequence.part_range != (begin, end):
            sequence.part_range = begin, end
            sequence.part_hashes = self._parts(sequence, blocks, sequence.tokens[begin:end])
        for index in range(len(sequence.part_hashes), 0, -1):
            digest = sequence.part_hashes[index - 1]
            keys = [cache_key(digest, number) for number, _ in self._own]
            sources = [self.pool.find_part(key) for key in keys]
            # A copy is made before the step, so the tokens must have been computed before it.
            if all(sources) and self._just_registered.isdisjoint(sources):
                return index * self.part_size, sources
        return 0, ()

    def _parts(self, sequence: Sequence, index: int, tokens: Seq[int]) -> list[bytes]:
        """Return the hashes of the beginnings of block `index`, which begins with `tokens`."""
        if not self.part_size or self.hasher is None:
            return []
        parent = sequence.hashes[index - 1] if index else sequence.hash_root
        return self.hasher.parts(tokens, self.part_size, parent, index, sequence.images)

    def begin_step(self) -> None:
        """Note that the KV of all registered blocks is computed before the next step."""
        self._just_registered.clear()
        if self.states is not None:
            self.states.begin_step()

    def state_computed_by(self, sequence: Sequence) -> int | None:
        """Return the request whose part in this step leaves a state that `sequence` could use."""
        if self.states is None:
            return None
        self._hash(sequence)
        return self.states.computed_by(sequence.hashes[: sequence.num_skippable // self.block_size])

    def _match(self, hashes: Seq[bytes]) -> list[list[int]]:
        """Return the tables of the longest cached prefix.

        Every group must still have those of its blocks that later queries see.
        """
        length = len(hashes)
        known: list[list[int]] = [[] for _ in self.groups]
        for number, group in self._own:
            if group.window is None:
                keys = (cache_key(digest, number) for digest in hashes[:length])
                known[number] = self.pool.lookup(keys)
                length = len(known[number])
        for number, group in self._own:
            if group.window is not None:
                keys = (cache_key(digest, number) for digest in hashes[:length])
                known[number] = [self.pool.find(key) for key in keys]
        length = self._longest_without_holes(known, hashes[:length])
        tables = []
        for table, first in zip(known, self._first_visible(length), strict=True):
            tables.append([0] * first + table[first:length])
        return tables

    def _first_visible(self, length: int) -> list[int]:
        """Return, per group, the first block that a query behind `length` blocks sees."""
        size = self.block_size
        return [group.first_visible_block(length * size, size) for group in self.groups]

    def _longest_without_holes(self, known: list[list[int]], hashes: Seq[bytes]) -> int:
        """Return the longest prefix, in blocks, whose state and visible blocks are all known."""
        length = len(hashes)
        while True:
            if self.states is not None:
                length = self.states.num_kept(hashes[:length])
            firsts = self._first_visible(length)
            last_hole = -1
            for number, _ in self._own:
                holes = [i for i in range(firsts[number], length) if not known[number][i]]
                last_hole = max([last_hole, *holes])
            if last_hole < 0:
                return length
            length = last_hole  # every longer prefix needs that block

    def _match_source(self, sequence: Sequence, tables: list[list[int]]) -> None:
        """Find the blocks of the source. Unless all are cached, mark the source to be encoded."""
        sequence.needs_encoding = False
        for number in self.cross_groups:
            keys = self._source_keys(sequence, number)
            if self.hasher is not None:
                tables[number] = self.pool.lookup(keys)
            if len(tables[number]) < len(keys):
                sequence.needs_encoding = True
        if sequence.needs_encoding:
            for number in self.cross_groups:
                tables[number] = []

    def _register_source(self, sequence: Sequence) -> None:
        """Make the source's blocks findable: the encoder pass writes them before any later read."""
        if self.hasher is None:
            return
        for number in self.cross_groups:
            keys = self._source_keys(sequence, number)
            for block, key in zip(sequence.tables[number], keys, strict=True):
                self.pool.register(block, key)

    def _source_keys(self, sequence: Sequence, group: int) -> list[bytes]:
        """Return the prefix cache keys of the blocks of a source."""
        blocks = range(self._num_blocks(len(sequence.encoder_prompt)))
        digests = (sequence.hash_root + index.to_bytes(4, "big") for index in blocks)
        return [cache_key(digest, group) for digest in digests]

    def release_unseen(self, sequence: Sequence) -> None:
        """Release the blocks that no token still to be computed will see."""
        journal = self.pool.journal
        for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            end = group.first_visible_block(sequence.num_computed, self.block_size)
            first = min(end, len(table))
            while first and table[first - 1]:
                first -= 1
            unseen = tuple(table[first:end])
            self.pool.release(unseen)
            table[first:end] = [0] * len(unseen)
            if journal is not None and unseen:
                journal.append(BlockEvent("pass", sequence.id, number, first, unseen))

    def num_missing(self, sequence: Sequence, count: int) -> int:
        """Return the number of blocks to allocate before `count` more tokens are computed."""
        wanted = self._num_blocks(sequence.num_computed + count)
        missing = (wanted - len(sequence.tables[number]) for number, _ in self._own)
        return sum(max(number, 0) for number in missing)

    def extend(self, sequence: Sequence, count: int) -> list[NewBlocks]:
        """Allocate the blocks that `num_missing` counts; return those appended to each table."""
        wanted = self._num_blocks(sequence.num_computed + count)
        appended = []
        for number, _ in self._own:
            table = sequence.tables[number]
            first = len(table)
            if first < wanted:
                table += self.pool.allocate(wanted - first)
                blocks = tuple(table[first:])
                appended.append(NewBlocks(sequence.row, number, first, blocks))
                if self.pool.journal is not None:
                    event = BlockEvent("take", sequence.id, number, first, blocks)
                    self.pool.journal.append(event)
        return appended

    def fresh(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a newly opened sequence that the prefix cache did not fill."""
        copied = {copy.target for copy in sequence.copies}
        fresh: list[int] = []
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if not group.is_cross:
                fresh += [b for b in table[sequence.num_registered :] if b not in copied]
            elif sequence.needs_encoding:
                fresh += table
        return fresh

    def close(self, sequence: Sequence) -> None:
        """Release everything a sequence holds."""
        for table in sequence.tables:
            self.pool.release([block for block in table if block])
        sequence.tables = []
        if self.states is not None:
            self.states.close(sequence)

    def register(self, sequence: Sequence) -> None:
        """Add full blocks of known tokens to the prefix cache.

        Their KV may still be in flight. Sequences that find them read later, on the same stream.
        """
        known = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
        if self.hasher is None or sequence.num_registered >= known:
            return
        self._hash(sequence)
        for index in range(sequence.num_registered, known):
            first = index * self.block_size
            tokens = sequence.tokens[first : first + self.block_size - 1]
            parts = self._parts(sequence, index, tokens)
            for number, _ in self._own:
                block = sequence.tables[number][index]
                if block:
                    keys = [cache_key(part, number) for part in parts]
                    self.pool.register(block, cache_key(sequence.hashes[index], number), keys)
                    self._just_registered.add(block)
            if self.states is not None:
                self.states.register(sequence, index + 1)
            for observe in self.observers:
                observe(sequence, index)
        sequence.num_registered = known

    def forget(self, sequence: Sequence) -> None:
        """Remove from the prefix cache the blocks that a sequence wrote or that only it holds."""
        for number, group in enumerate(self.groups):
            if group.is_cross:
                keys = self._source_keys(sequence, number)
                num_found = 0 if sequence.needs_encoding else len(keys)
            else:
                keys = [cache_key(digest, number) for digest in sequence.hashes]
                num_found = sequence.num_matched
            written = set(sequence.tables[number][num_found:])
            for key in keys:
                block = self.pool.find(key)
                if block and (block in written or not self.pool.is_shared(block)):
                    self.pool.forget(block)
        if self.states is not None:
            self.states.forget(sequence)

    def _hash(self, sequence: Sequence) -> None:
        if self.hasher is None:
            return
        if not sequence.hash_root:
            sequence.hash_root = self.hasher.root(
                sequence.salt, sequence.encoder_prompt, sequence.adapter, sequence.ablation_key
            )
        self.hasher.extend(sequence.hashes, sequence.tokens, sequence.hash_root, sequence.images)

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert that the tables explain all reference counts, and that windows keep few blocks."""
        held = [[block for table in s.tables for block in table if block] for s in sequences]
        self.pool.check(held)
        if self.states is not None:
            self.states.check(sequences)
        for sequence in sequences:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                self._check_table(sequence, group, table)

    def _check_table(self, sequence: Sequence, group: KVGroup, table: list[int]) -> None:
        computed = len(sequence.encoder_prompt) if group.is_cross else sequence.num_computed
        assert len(table) * self.block_size >= computed
        assert group.is_cross or sequence.num_registered <= len(table)
        blocks = [block for block in table if block]
        assert table[len(table) - len(blocks) :] == blocks, "a table has a hole"
        if group.window is not None:
            seen = self._num_blocks(group.window - 1 + self.step_tokens)
            assert len(blocks) <= 1 + seen, "a window holds more than it sees"
