"""Prefill fairness: what a long prompt leaves of a step to decodes and to other prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, takewhile

from engine.scheduling.block_tables import BlockTables
from engine.scheduling.sequence import Sequence

SMALLEST_CHUNK = 16  # tokens; smaller ones would multiply the steps of a long prompt


def step_budget(running: Seq[tuple[Sequence, int]], most: int, context_cost: float) -> int:
    """Return the token budget of the next step, at most `most`.

    `running` has each running sequence with its number of uncomputed tokens.

    Decodes wait until the step's chunk of a prompt is computed, and a chunk costs more the more
    context it attends to. So while there are decodes, chunks with more context than `most` get
    smaller. Then the steps of a long prompt take about the same time. A prompt that this step
    admits is not counted: the next step is the first to see its context, which a cached prefix can
    make long at once.

    `context_cost` is the cost of attending to one token of context, as a share of the other costs
    of a token. With 0 every step has the whole budget.
    """
    if not context_cost:
        return most
    # A sequence that awaits the results of a step has no uncomputed tokens.
    context = max([sequence.num_computed for sequence, due in running if due > 1], default=0)
    decodes = [due for _, due in running].count(1)
    if not decodes or context <= most:
        return most
    share = (1 + most * context_cost) / (1 + context * context_cost)
    chunk = int((most - decodes) * share)
    return min(most, decodes + max(SMALLEST_CHUNK, chunk))


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
    much more than twice its steps alone. A prompt that fits one step always has its turn.

    A waiting prompt that would share the next block of `chunk` waits to reuse it. The queue behind
    it waits too.
    """
    queue = takewhile(lambda other: not tables.shares_next_block(other, chunk), waiting)
    before, behind_chunk = _tokens_ranked_before(chunk, queue, tables)
    before = min(before, most - 1)
    rest = most - before
    shorter = _tokens_of_shorter(chunk, chain(behind, behind_chunk), rest - 1, tables)
    if shorter > rest // 2 and is_own_turn:
        shorter = 0
    return before + shorter


def _tokens_ranked_before(
    chunk: Sequence, queue: Iterator[Sequence], tables: BlockTables
) -> tuple[int, Iterator[Sequence]]:
    """Return the tokens of the queue's prompts that rank before `chunk`, and the other prompts."""
    tokens = 0
    for other in queue:
        if other.rank > chunk.rank:
            return tokens, chain([other], queue)
        tokens += tables.num_uncomputed(other)
    return tokens, iter(())


def _tokens_of_shorter(
    chunk: Sequence, others: Iterable[Sequence], limit: int, tables: BlockTables
) -> int:
    """Return the tokens that shorter prompts of equal priority need, at most `limit`.

    Prompts that rank between `chunk` and a shorter prompt get their share too.
    """
    due = shorter = 0
    for other in others:
        tokens = tables.num_uncomputed(other)
        is_decode = tokens <= 1 and other.row >= 0  # the budget has reserved its token already
        if is_decode or other.priority != chunk.priority:
            continue
        due += tokens
        if tokens < chunk.num_uncomputed:
            shorter = min(due, limit)
        if shorter == limit:
            break  # looking at more of the queue would only cost time
    return shorter
