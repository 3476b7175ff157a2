"""How a step's token budget is shared between a long prompt and those it would shut out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, takewhile

from engine.scheduling.sequence import Sequence
from engine.scheduling.tables import BlockTables


def left_by(
    chunk: Sequence,
    most: int,
    behind: Seq[Sequence],
    waiting: Iterable[Sequence],
    tables: BlockTables,
    *,
    keeps_more: bool,
) -> int:
    """How many of `most` tokens `chunk` leaves to those that run `behind` it and to those that are
    `waiting`, in their order; it keeps one at least.

    Shorter ones of its priority have what they need where that is up to half, and else every second
    step, in which it `keeps_more` not, as small chunks are slow: so neither takes much over twice
    the steps it would take alone. Whoever stands between them has its share, too. Among equals the
    first goes first. Those that wait and rank before it have what they need. Who begins like it
    waits for what it computes, and so does whoever waits behind that one.
    """
    queue: Iterator[Sequence]
    queue = takewhile(lambda other: not tables.would_share(other, chunk), waiting)
    before = due = shorter = 0
    for other in queue:
        if other.rank > chunk.rank:
            queue = chain((other,), queue)
            break
        before += tables.due(other)
    before = min(before, most - 1)
    rest = most - before
    for other in chain(behind, queue):
        tokens = tables.due(other)
        if other.priority != chunk.priority or (tokens <= 1 and other.row >= 0):
            continue  # the token of a decode is set aside already
        due += tokens
        if tokens < chunk.num_uncomputed:
            shorter = min(due, rest - 1)
            if shorter == rest - 1:
                break
    if shorter > rest // 2 and keeps_more:
        shorter = 0
    return before + shorter
