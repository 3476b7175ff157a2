"""BlockTables: which blocks of the pool hold which tokens of which sequence, group by group.

A sequence has one table per KV group; entry j is the block of its tokens from j * block_size on, or
0 where the group has given it back, or never needed it, because no later query sees it. Everything
here is exact bookkeeping: what is found, held, or too little is decided before anything is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from engine.protocol import KVGroup
from engine.scheduling.blocks import BlockHasher, BlockPool
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import NewBlocks


class BlockTables:
    """The tables of all sequences over one pool. `step_tokens` is the most a step computes."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher | None,
        groups: Seq[KVGroup],
        block_size: int,
        step_tokens: int,
    ) -> None:
        self.pool = pool
        self.hasher = hasher  # None: prefixes are not shared
        self.groups = groups
        self.block_size = block_size
        self.step_tokens = step_tokens

    def most_blocks(self, tokens: int) -> int:
        """Blocks a sequence of `tokens` holds at once, at most."""
        return sum(g.most_blocks(tokens, self.step_tokens, self.block_size) for g in self.groups)

    def open(self, sequence: Sequence, spare: int) -> bool:
        """Take what the cache knows of a waiting sequence and blocks for the rest of its tokens.

        Windows take theirs chunk by chunk, but only a sequence that can be computed to its end
        with `spare` blocks left over is let in. False, and nothing held, for any other.
        """
        size, tokens = self.block_size, len(sequence.tokens)
        self._hash(sequence)
        # The last token is always computed: its logits are what the first sample needs.
        tables = self._match(sequence.hashes[: (tokens - 1) // size])
        found = [block for table in tables for block in table if block]
        missing = self.most_blocks(tokens) - len(found)
        if missing + spare > self.pool.num_available - self.pool.num_idle(found):
            return False
        self.pool.hold(found)
        matched = len(tables[0])
        for group, table in zip(self.groups, tables, strict=True):
            if group.window is None:
                table += self.pool.allocate(-(-tokens // size) - matched)
        sequence.tables = tables
        sequence.num_computed = matched * size
        sequence.num_registered = matched
        return True

    def _match(self, hashes: Seq[bytes]) -> list[list[int]]:
        """Tables of the longest prefix of which every group still has what later queries see."""
        size, length = self.block_size, len(hashes)
        known: list[list[int]] = [[] for _ in self.groups]
        for number, group in enumerate(self.groups):
            if group.window is None:
                names = (_name(digest, number) for digest in hashes[:length])
                length = len(table := self.pool.lookup(names))
                known[number] = table
        for number, group in enumerate(self.groups):
            if group.window is not None:
                known[number] = [self.pool.find(_name(d, number)) for d in hashes[:length]]
        while True:
            firsts = [group.first_block(length * size, size) for group in self.groups]
            holes = [
                index
                for table, first in zip(known, firsts, strict=True)
                for index in range(first, length)
                if not table[index]
            ]
            if not holes:
                break
            length = max(holes)  # whatever is longer needs that block too
        return [
            [0] * first + table[first:length] for table, first in zip(known, firsts, strict=True)
        ]

    def give_back(self, sequence: Sequence) -> None:
        """Release what no token still to be computed will see."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            end = group.first_block(sequence.num_computed, self.block_size)
            first = min(end, len(table))
            while first and table[first - 1]:
                first -= 1
            self.pool.release(table[first:end])
            table[first:end] = [0] * len(table[first:end])

    def missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to be allocated before `count` more tokens are computed."""
        wanted = -(-(sequence.num_computed + count) // self.block_size)
        return sum(max(wanted - len(table), 0) for table in sequence.tables)

    def extend(self, sequence: Sequence, count: int) -> list[NewBlocks]:
        """Allocate what `missing` counts; returns what was appended to which table."""
        wanted = -(-(sequence.num_computed + count) // self.block_size)
        appended = []
        for number, table in enumerate(sequence.tables):
            if (first := len(table)) < wanted:
                table += self.pool.allocate(wanted - first)
                appended.append(NewBlocks(sequence.row, number, first, tuple(table[first:])))
        return appended

    def close(self, sequence: Sequence) -> None:
        """Release everything a sequence holds."""
        for table in sequence.tables:
            self.pool.release([block for block in table if block])
        sequence.tables = []

    def register(self, sequence: Sequence) -> None:
        """Offer full blocks of known tokens to the prefix cache.

        Their KV may still be in flight: whoever finds them reads later on the same stream.
        """
        known = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
        if self.hasher is None or sequence.num_registered >= known:
            return
        self._hash(sequence)
        for index in range(sequence.num_registered, known):
            for number, table in enumerate(sequence.tables):
                if block := table[index]:
                    self.pool.register(block, _name(sequence.hashes[index], number))
        sequence.num_registered = known

    def forget(self, sequence: Sequence) -> None:
        """Whatever holds these tokens for this sequence alone must not be found again."""
        for digest in sequence.hashes:
            for number in range(len(self.groups)):
                block = self.pool.find(_name(digest, number))
                if block and not self.pool.is_shared(block):
                    self.pool.forget(block)

    def _hash(self, sequence: Sequence) -> None:
        if self.hasher is not None:
            self.hasher.extend(sequence.hashes, sequence.tokens, sequence.salt)

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert that the tables account for every reference, and that windows keep no more."""
        held = [[block for table in s.tables for block in table if block] for s in sequences]
        self.pool.check(held)
        for sequence in sequences:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                blocks = [block for block in table if block]
                assert len(table) * self.block_size >= sequence.num_computed
                assert group.window is None or len(blocks) <= 1 + -(
                    -(group.window - 1 + self.step_tokens) // self.block_size
                ), "a window holds more than it sees"
                assert table[len(table) - len(blocks) :] == blocks, "a table has a hole"


def _name(digest: bytes, group: int) -> bytes:
    """What a block is found by: its tokens and all before them, and whose layers it serves."""
    return digest + group.to_bytes(2, "big")
