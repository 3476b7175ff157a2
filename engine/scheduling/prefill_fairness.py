"""Prefill fairness: share a step's token budget between a long prompt and other prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, takewhile

from engine.scheduling.block_tables import BlockTables
from engine.scheduling.sequence import Sequence


def tokens_for_others(
    chunk: Sequence,
    most: int,
    behind: Seq[Sequence],
    waiting: Iterable[Sequence],
    tables: BlockTables,
    *,
    is_own_turn: bool,
) -> int:
    """Return how many of `most` tokens the long prompt `chunk` leaves to other prompts.

    The others are the sequences that run `behind` it and those that are `waiting`, both in rank
    order. `chunk` keeps at least one token.

    Waiting prompts that rank before `chunk` run in full. Shorter prompts of equal priority run in
    full if they need at most half of the remaining tokens. Otherwise the two sides alternate steps,
    because small chunks are slow; `is_own_turn` marks the long prompt's turn. So neither side needs
    much more than twice its steps alone. Prompts that rank between `chunk` and a shorter prompt get
    their share too. Among prompts of equal length, the first one goes first.

    A waiting prompt that would share the next block of `chunk` waits to reuse it. The queue behind
    it waits too.
    """
    queue: Iterator[Sequence]
    queue = takewhile(lambda other: not tables.shares_next_block(other, chunk), waiting)
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
            continue  # the budget has already reserved one token for each decode
        due += tokens
        if tokens < chunk.num_uncomputed:
            shorter = min(due, rest - 1)
            if shorter == rest - 1:
                break
    if shorter > rest // 2 and is_own_turn:
        shorter = 0
    return before + shorter
