"""How a step's token budget is shared between a long prompt and those it would shut out."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.sequence import Sequence
from engine.scheduling.tables import BlockTables


def left_by(chunk: Sequence, most: int, others: Iterable[Sequence], tables: BlockTables) -> int:
    """How many of `most` tokens `chunk` leaves to `others`, in their order; it keeps one at least.

    Shorter ones of its priority behind it have what they need where that is up to half, and else
    every second step, as small chunks are slow: so neither takes much over twice the steps it would
    take alone. Whoever stands between them has its share, too. Among equals the first goes first,
    and who begins like it waits for what it computes. Those that rank before it, and wait, have
    what they need.
    """
    before = due = shorter = 0
    for other in others:
        tokens = other.num_uncomputed
        if tables.would_share(other, chunk):
            break
        if other.rank < chunk.rank:
            before += tokens
        elif other.priority == chunk.priority and (tokens > 1 or other.row < 0):
            due += tokens
            if tokens < chunk.num_uncomputed:
                shorter = due
    before = min(before, most - 1)
    rest = most - before
    if shorter > rest // 2:
        shorter = rest - 1 if chunk.gives_way else 0
        chunk.gives_way = not chunk.gives_way
    return before + shorter
