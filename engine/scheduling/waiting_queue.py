"""WaitingQueue: the sequences that wait for a row and blocks, and why the first of them waits."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from engine.protocol.journal import WaitReason
from engine.protocol.outputs import Admission
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.sequence import Sequence
from engine.scheduling.tenant_turns import TenantTurns


class WaitingQueue:
    """Waiting sequences in order of rank.

    The scheduler admits the first one or says why not, so `reason` is that of its last decision.
    The others wait behind the first, unless it waits for its adapter (see `first`).
    """

    def __init__(self, adapters: AdapterSlots) -> None:
        self._adapters = adapters
        self.turns = TenantTurns()
        self.sequences: list[Sequence] = []
        self.reason: WaitReason = "budget"
        self.needed = 0  # reason "blocks": how many it needs, and how many were available
        self.available = 0
        self.sharing = 0  # reason "prefix": the request that computes its next block
        self._refused_id = 0  # the last sequence that lacked blocks
        self.admitted: list[tuple[int, int]] = []  # (id, cached tokens), not taken yet
        self.prefix_queries = 0  # tokens: see EngineStats
        self.prefix_hits = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, or one that was preempted."""
        if not sequence.admitted:
            sequence.turn = self.turns.join(sequence.tenant)
        bisect.insort(self.sequences, sequence, key=lambda s: s.rank)

    def first(self) -> Sequence | None:
        """Return the first sequence whose adapter is in memory; let those before it be loaded.

        Behind a sequence that finds every slot in use, only those without an adapter may run. So
        the slots become free for it.
        """
        self._order()
        is_full = False
        for sequence in self.sequences:
            adapter = sequence.adapter
            if not adapter or (not is_full and self._adapters.is_resident(adapter)):
                return sequence
            if not is_full:
                is_full = not self._adapters.want(adapter)
        if self.sequences:
            self.refuse("adapter")
        return None

    def _order(self) -> None:
        """Order the queue if the turns of the tenants have changed."""
        if self.turns.is_stale:
            new = [sequence for sequence in self.sequences if not sequence.admitted]
            turns = self.turns.turns(new)
            for sequence in new:
                sequence.turn = turns[sequence.id]
            self.sequences.sort(key=lambda sequence: sequence.rank)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, whether it waits or runs."""
        if sequence.row < 0:
            self.sequences.remove(sequence)
        self.turns.leave(sequence.tenant, sequence.num_outputs)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that has its blocks, and count its first admission."""
        self.sequences.remove(sequence)
        if sequence.admitted:
            return
        sequence.admitted = True
        self.turns.count(sequence.tenant, sequence.size)
        cached = sequence.num_computed
        if not sequence.needs_encoding:
            cached += len(sequence.encoder_prompt)
        sequence.num_cached = cached
        self.prefix_queries += sequence.size
        self.prefix_hits += cached
        self.admitted.append((sequence.id, cached))

    def take_admissions(self, at: float) -> list[Admission]:
        """Return the requests admitted for the first time since the last call."""
        admitted, self.admitted = self.admitted, []
        return [Admission(request_id, at, cached) for request_id, cached in admitted]

    def refuse(self, reason: WaitReason) -> None:
        """Note why the first sequence was not admitted."""
        self.reason = reason

    def refuse_for_blocks(self, sequence: Sequence, needed: int, available: int) -> None:
        """Note that a sequence lacks blocks."""
        self.reason = "blocks"
        self.needed, self.available = needed, available
        self._refused_id = sequence.id

    def refuse_for_prefix(self, sharing: int) -> None:
        """Note that the first sequence waits to reuse a block that request `sharing` computes."""
        self.reason = "prefix"
        self.sharing = sharing

    def admissible(self, num_rows: int, available: int) -> Seq[Sequence]:
        """Return the sequences that may be admitted, given the free rows and available blocks.

        None may if the first one lacked blocks, and there are no more since.
        """
        if not self.sequences:
            return ()
        if self.sequences[0].id == self._refused_id and available <= self.available:
            return ()
        return self.sequences[:num_rows]

    def check(self, opened: Iterable[Sequence]) -> None:
        """Assert the invariants, given all sequences that have not ended."""
        self.turns.check(sequence.tenant for sequence in opened)
        ranks = [sequence.rank for sequence in self.sequences]
        assert ranks == sorted(ranks), "order of the queue"
        for sequence in self.sequences:
            assert not sequence.tables, "a waiting sequence holds blocks"
            assert sequence.row == -1
            assert sequence.num_computed == 0
