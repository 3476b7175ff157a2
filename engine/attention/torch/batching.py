"""Group the sequences of a step whose queries are computed together, padded to one shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.layout import GroupLayout, StepLayout

# Number of keys per reduction. Up to 256 keys, oneDNN's bf16 matmul gives the same bits as if the
# keys were padded with zeros. With a window, the gathered keys begin at a multiple of both splits.
SPLIT = 256
FUSED_SPLIT = 512  # in torch's fused kernel for CPUs
# A group ends where padding its sequences to one shape would more than double the work.
MAX_PADDING = 2
MAX_SCORES = 2**20  # per head: larger groups are not faster, and take more memory

# For one sequence: the gathered blocks [first, end), the first block that a query sees, and the
# index of the last key.
Reach = tuple[int, int, int, int]  # first, seen, end, last key


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """`sequences` with `count` new tokens each; shorter ones repeat their last token."""

    first: int  # index of the group's first token, if `order` is None
    sequences: int
    count: int
    positions: torch.Tensor  # [sequences, count] of the queries
    tables: torch.Tensor  # [sequences, blocks]
    first_keys: torch.Tensor | None  # [sequences] first key of each table; None: all at key 0
    last_keys: torch.Tensor  # [sequences] index of the last key
    order: torch.Tensor | None = None  # [sequences * count] tokens, if they are not contiguous


def query_groups(layout: StepLayout, kv: GroupLayout) -> list[QueryGroup]:
    """Return the groups of a step: decodes of similar length, adjacent chunks of similar shape."""
    if layout.query_lens is None:
        return [_captured_group(layout, kv)]
    decodes, reach = layout.num_decodes, _reach(layout, kv)
    groups = _decode_groups(layout, kv, reach[:decodes]) if decodes else []
    return groups + chunk_groups(layout, kv, reach)


def chunk_groups(
    layout: StepLayout, kv: GroupLayout, reach: list[Reach] | None = None
) -> list[QueryGroup]:
    """Return the groups of the sequences after the decodes."""
    assert layout.query_lens is not None
    reach = reach or _reach(layout, kv)
    groups: list[QueryGroup] = []
    first = token = layout.num_decodes  # index of a sequence, and of its first token
    while first < len(reach):
        members = slice(first, _end_of_group(layout, reach, first))
        groups.append(_chunk_group(layout, kv, members, reach[members], token))
        first, token = members.stop, token + sum(layout.query_lens[members])
    return groups


def _end_of_group(layout: StepLayout, reach: list[Reach], first: int) -> int:
    """Return the first sequence after `first` whose shape differs too much to join its group."""
    counts, size = layout.query_lens, layout.block_size
    assert counts is not None
    longest = widest = work = 0
    for index in range(first, len(reach)):
        blocks = reach[index][2] - reach[index][0]
        longest, widest = max(longest, counts[index]), max(widest, blocks)
        work += counts[index] * blocks
        padded = (index - first + 1) * longest * widest
        if index > first and padded > min(MAX_PADDING * work, MAX_SCORES // size):
            return index
    return len(reach)


def _chunk_group(
    layout: StepLayout, kv: GroupLayout, members: slice, reach: list[Reach], token: int
) -> QueryGroup:
    assert layout.query_lens is not None
    counts = layout.query_lens[members]
    longest, tables = max(counts), _tables(layout, kv, members, reach)
    positions, order = layout.positions[token : token + sum(counts)], None
    if min(counts) < longest:
        sizes = torch.tensor(counts, device=positions.device)
        each = torch.arange(longest, device=positions.device).minimum(sizes[:, None] - 1)
        each += (sizes.cumsum(0) - sizes)[:, None]
        positions, order = positions[each], (token + each).flatten()
    positions = positions.view(-1, longest)
    return QueryGroup(token, len(counts), longest, positions, *tables, order)


def _captured_group(layout: StepLayout, kv: GroupLayout) -> QueryGroup:
    """Return one group in which each token has its sequence's whole block table.

    The shapes and values depend on no data of the host, so that the step can be captured.
    """
    positions, tables = layout.positions[:, None], kv.block_tables
    last = (layout.lengths if kv.key_lengths is None else kv.key_lengths) - 1
    if layout.num_decodes < len(tables):
        tokens = torch.arange(len(positions), dtype=torch.int32, device=tables.device)
        owners = torch.searchsorted(layout.query_starts[1:], tokens, right=True)
        owners.clamp_(max=len(tables) - 1)
        tables, last = tables.index_select(0, owners), last.index_select(0, owners)
    if kv.window is None:
        return QueryGroup(0, len(tables), 1, positions, tables, None, last)
    # Blocks before the window may belong to another sequence by now. A NaN in them would pass the
    # mask, so read the null block instead.
    seen = (positions - kv.window + 1).clamp(min=0) // layout.block_size
    entries = torch.arange(tables.shape[1], device=tables.device)
    tables = tables.where(entries >= seen, 0)
    return QueryGroup(0, len(tables), 1, positions, tables, torch.zeros_like(last), last)


def _reach(layout: StepLayout, kv: GroupLayout) -> list[Reach]:
    size, window, lengths = layout.block_size, kv.window, kv.key_lens or layout.seq_lens
    assert lengths is not None
    assert layout.query_lens is not None
    reach = []
    for count, length in zip(layout.query_lens, lengths, strict=True):
        seen = 0 if window is None else max(0, length - count - window + 1)
        begin = seen // FUSED_SPLIT * FUSED_SPLIT
        reach.append((begin // size, seen // size, -(-length // size), length - 1))
    return reach


def _decode_groups(layout: StepLayout, kv: GroupLayout, reach: list[Reach]) -> list[QueryGroup]:
    blocks = [end - first for first, _, end, _ in reach]
    if max(blocks) * len(blocks) <= MAX_PADDING * sum(blocks):
        everyone = slice(0, len(blocks))
        positions = layout.positions[everyone].view(-1, 1)
        tables = _tables(layout, kv, everyone, reach)
        return [QueryGroup(0, len(blocks), 1, positions, *tables)]
    groups: list[QueryGroup] = []
    order = sorted(range(len(blocks)), key=blocks.__getitem__, reverse=True)
    while order:
        longest = blocks[order[0]]
        near = [i for i in order if blocks[i] * MAX_PADDING >= longest]
        order = order[len(near) :]
        index = torch.tensor(near, device=layout.positions.device)
        positions = layout.positions.index_select(0, index).view(-1, 1)
        tables = _tables(layout, kv, index, [reach[i] for i in near])
        groups.append(QueryGroup(0, len(near), 1, positions, *tables, index))
    return groups


def _tables(
    layout: StepLayout, kv: GroupLayout, members: slice | torch.Tensor, reach: list[Reach]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the part of the members' block tables that their queries see.

    Also returns the first key of each table (None without a window) and the last key.
    """
    tables, width = kv.block_tables[members], max(end - first for first, _, end, _ in reach)
    first, seen, end, last = torch.tensor(reach, device=tables.device).T
    if kv.window is None:
        return tables[:, :width], None, last
    entries = first[:, None] + torch.arange(width, device=tables.device)
    visible = (entries >= seen[:, None]) & (entries < end[:, None])
    tables = tables.gather(1, entries.clamp(max=tables.shape[1] - 1))
    return tables.where(visible, 0), first * layout.block_size, last
