"""StateSlots: where the states of recurrent layers are kept, per sequence and block edge.

A layer with a state keeps a fixed number of bytes in place of keys and values. The state behind a
token cannot be cut back to an earlier token, so states at block edges are kept: as snapshots, found
by the hash of the tokens before them. Slots are counted like blocks, and evicted like them. Slot 0
is the state before the first token. It is never allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.drafts import MOST_ROWS
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import SliceStates


def least_slots(max_num_seqs: int) -> int:
    """Return how many slots `max_num_seqs` sequences may need at once.

    Each holds its newest edge, its last token's state and, behind a chunk, the edge before. Each
    drafted token of the last two steps has a slot.
    """
    return 3 * max_num_seqs + 2 * MOST_ROWS


class SnapshotPool(BlockPool):
    """The slots. Snapshots that their sequence has passed, and no later one has used, go first.

    So a long prompt, which passes many edges, does not evict the ends of conversations.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._passed: dict[int, None] = {}  # cached ones, the oldest first
        self._used: set[int] = set()

    def hold(self, blocks: Iterable[int]) -> None:
        for slot in blocks:
            super().hold([slot])
            self._passed.pop(slot, None)
            self._used.add(slot)

    def pass_by(self, slot: int) -> None:
        """Release a state that its sequence goes on from."""
        self.release([slot])
        if slot in self._cached and slot not in self._used:
            self._passed[slot] = None

    def forget(self, block: int) -> None:
        super().forget(block)
        self._passed.pop(block, None)
        self._used.discard(block)

    def _victim(self) -> int:
        return next(iter(self._passed or self._cached))

    def check(self, tables: Iterable[Seq[int]]) -> None:
        super().check(tables)
        assert self._passed.keys() <= self._cached.keys(), "a passed snapshot is not cached"
        assert self._used.isdisjoint(self._passed), "a used snapshot counts as passed"


class StateSlots:
    """The slots of all sequences; a sequence's `states` maps a number of tokens to its slot.

    With `keeps_edges` the states at block edges are kept for later sequences. The newest edge
    always is; those inside a chunk are while slots are plentiful.
    """

    def __init__(
        self,
        num_slots: int,
        max_num_seqs: int,
        block_size: int,
        *,
        keeps_edges: bool,
    ) -> None:
        self.pool = SnapshotPool(num_slots)
        self._block_size = block_size
        self._keeps_edges = keeps_edges
        self._least = least_slots(max_num_seqs)
        assert num_slots >= self._least, "a running sequence could lack a slot"
        # Snapshots that this step computes, with the id of their sequence. Later steps read them.
        self._coming: dict[int, int] = {}

    def begin_step(self) -> None:
        """Note that all registered states are computed before the next step."""
        self._coming.clear()

    def num_kept(self, hashes: Seq[bytes]) -> int:
        """Return the largest number of leading blocks whose state is kept, by their hashes."""
        for count in range(len(hashes), 0, -1):
            slot = self.pool.find(hashes[count - 1])
            if slot and slot not in self._coming:
                return count
        return 0

    def computed_by(self, hashes: Seq[bytes]) -> int | None:
        """Return the request whose part in this step ends at one of these edges, or None."""
        if not self._coming:
            return None
        slots = (self.pool.find(digest) for digest in reversed(hashes))
        found = next((slot for slot in slots if slot), 0)
        return self._coming.get(found)

    def open(self, sequence: Sequence, blocks: int) -> None:
        """Hold the state behind the first `blocks` blocks of an admitted sequence."""
        sequence.states = {}
        if blocks:
            slot = self.pool.find(sequence.hashes[blocks - 1])
            self.pool.hold([slot])
            sequence.states[blocks * self._block_size] = slot

    def take(
        self, sequence: Sequence, start: int, count: int, *, is_draft: bool = False
    ) -> SliceStates:
        """Return where the next `count` tokens, from `start` on, read and write their states.

        A drafted token may be wrong, so it keeps the state before it.
        """
        if not is_draft:
            self._release_old(sequence, start)
        states, size, end = sequence.states, self._block_size, start + count
        read = states.get(start, 0)
        writes = []
        if self._keeps_edges:
            for edge in range(start - start % size + size, end, size):
                is_newest = edge + size > end
                if is_newest or self.pool.num_available > self._least:
                    (states[edge],) = self.pool.allocate(1)
                    writes.append((edge - start - 1, states[edge]))
        if read and not is_draft and not (self._keeps_edges and start % size == 0):
            states[end] = states.pop(start)
        else:
            (states[end],) = self.pool.allocate(1)
        writes.append((count - 1, states[end]))
        return read, tuple(writes)

    def _release_old(self, sequence: Sequence, start: int) -> None:
        """Release all states but that behind `start` tokens and that at the newest edge.

        The step in the making reads none of them, so another sequence may write them.
        """
        states = sequence.states
        if len(states) < 2:
            return
        newest = start - start % self._block_size
        for tokens in [tokens for tokens in states if tokens not in (start, newest)]:
            self.pool.pass_by(states.pop(tokens))

    def register(self, sequence: Sequence, blocks: int) -> None:
        """Make the state behind `blocks` full blocks findable, if it is kept."""
        slot = sequence.states.get(blocks * self._block_size)
        if slot:
            self.pool.register(slot, sequence.hashes[blocks - 1])
            self._coming[slot] = sequence.id

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find the states that this one holds or wrote."""
        own = set(sequence.states.values())
        for slot in map(self.pool.find, sequence.hashes[sequence.num_matched :]):
            if slot and (slot in own or not self.pool.is_shared(slot)):
                self.pool.forget(slot)

    def close(self, sequence: Sequence) -> None:
        """Release all states of a sequence."""
        self.pool.release(list(sequence.states.values()))
        sequence.states = {}

    def gauges(self) -> dict[str, float]:
        """Return the numbers of slots that sequences hold, and of snapshots that none holds."""
        held, cached = self.pool.num_held, self.pool.num_cached
        return {"state_slots_held": held, "state_slots_cached": cached}

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert that the sequences explain all reference counts, and hold few slots."""
        held = [list(sequence.states.values()) for sequence in sequences]
        self.pool.check(held)
        for sequence in sequences:
            assert sequence.num_computed in sequence.states or not sequence.num_computed
            assert all(sequence.states.values()), "slot 0 is no sequence's own"
