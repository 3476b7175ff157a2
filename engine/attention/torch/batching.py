"""Group the sequences of a step whose queries are computed together, padded to one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.attention.backend import GroupLayout, StepLayout

# Number of keys per reduction. Up to 256 keys, oneDNN's bf16 matmul gives the same bits as if the
# keys were padded with zeros. With a window, the gathered keys begin at a multiple of both splits.
SPLIT = 256
FUSED_SPLIT = 512  # in torch's fused kernel for CPUs
# A group ends where padding its sequences to one shape would more than double the work.
MAX_PADDING = 2
MAX_SCORES = 2**20  # per head: larger groups are not faster, and take more memory


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
    seen_keys: torch.Tensor | None = None  # [sequences, count] last key of each; None: its own


class BlockRange(NamedTuple):
    """The blocks [first, end) of one sequence's table that are gathered."""

    first: int
    first_seen: int  # the first block with a key that a query sees
    end: int
    last_key: int


class KeyTables(NamedTuple):
    """The gathered part of some sequences' block tables."""

    tables: torch.Tensor  # [sequences, blocks]
    first_keys: torch.Tensor | None  # [sequences] first key of each table; None: all at key 0
    last_keys: torch.Tensor  # [sequences] index of the last key


def query_groups(layout: StepLayout, kv: GroupLayout) -> list[QueryGroup]:
    """Return the groups of a step: decodes of similar length, adjacent chunks of similar shape."""
    ranges = _block_ranges(layout, kv)
    num_decodes = layout.num_decodes
    groups = []
    if num_decodes:
        groups = _decode_groups(layout, kv, ranges[:num_decodes])
    if num_decodes < len(ranges):
        groups += _chunk_groups(layout, kv, ranges)
    return groups


def chunk_groups(layout: StepLayout, kv: GroupLayout) -> list[QueryGroup]:
    """Return the groups of the sequences after the decodes."""
    return _chunk_groups(layout, kv, _block_ranges(layout, kv))


def _block_ranges(layout: StepLayout, kv: GroupLayout) -> list[BlockRange]:
    size = layout.block_size
    lengths = kv.key_lens or layout.seq_lens
    assert lengths is not None, "the torch backend does not capture steps"
    assert layout.query_lens is not None
    if kv.window is None:
        return [BlockRange(0, 0, -(-length // size), length - 1) for length in lengths]
    ranges = []
    for count, length in zip(layout.query_lens, lengths, strict=True):
        first_query = length - count
        first_seen = max(0, first_query - kv.window + 1)
        first_key = first_seen // FUSED_SPLIT * FUSED_SPLIT
        end = -(-length // size)
        ranges.append(BlockRange(first_key // size, first_seen // size, end, length - 1))
    return ranges


# ---- decodes -------------------------------------------------------------------------------------


def _decode_groups(
    layout: StepLayout, kv: GroupLayout, ranges: Sequence[BlockRange]
) -> list[QueryGroup]:
    """Return one group if padding it costs little, else several by the number of blocks."""
    widths = [blocks.end - blocks.first for blocks in ranges]
    if max(widths) * len(widths) <= MAX_PADDING * sum(widths):
        members = slice(0, len(widths))
        positions = layout.positions[members]
        return [_decode_group(positions, _key_tables(layout, kv, members, ranges))]
    groups = []
    by_width = sorted(range(len(widths)), key=widths.__getitem__, reverse=True)
    while by_width:
        widest = widths[by_width[0]]
        near = [index for index in by_width if widths[index] * MAX_PADDING >= widest]
        by_width = by_width[len(near) :]
        order = torch.tensor(near, device=layout.positions.device)
        keys = _key_tables(layout, kv, order, [ranges[index] for index in near])
        positions = layout.positions.index_select(0, order)
        groups.append(_decode_group(positions, keys, order))
    return groups


def _decode_group(
    positions: torch.Tensor, keys: KeyTables, order: torch.Tensor | None = None
) -> QueryGroup:
    return QueryGroup(
        first=0,
        sequences=len(positions),
        count=1,
        positions=positions.view(-1, 1),
        tables=keys.tables,
        first_keys=keys.first_keys,
        last_keys=keys.last_keys,
        order=order,
    )


# ---- chunks --------------------------------------------------------------------------------------


def _chunk_groups(
    layout: StepLayout, kv: GroupLayout, ranges: Sequence[BlockRange]
) -> list[QueryGroup]:
    assert layout.query_lens is not None
    groups = []
    first_sequence = layout.num_decodes
    first_token = layout.num_decodes  # a decode has one token
    while first_sequence < len(ranges):
        end = _end_of_group(layout, ranges, first_sequence)
        members = slice(first_sequence, end)
        keys = _key_tables(layout, kv, members, ranges[members])
        counts = layout.query_lens[members]
        groups.append(_chunk_group(layout, counts, keys, first_token))
        first_sequence = end
        first_token += sum(counts)
    return groups


def _end_of_group(layout: StepLayout, ranges: Sequence[BlockRange], first: int) -> int:
    """Return the first sequence after `first` whose shape differs too much to join its group."""
    assert layout.query_lens is not None
    max_blocks = MAX_SCORES // layout.block_size
    longest = 0
    widest = 0
    work = 0
    for index in range(first, len(ranges)):
        count = layout.query_lens[index]
        width = ranges[index].end - ranges[index].first
        longest = max(longest, count)
        widest = max(widest, width)
        work += count * width
        padded = (index - first + 1) * longest * widest
        if index > first and padded > min(MAX_PADDING * work, max_blocks):
            return index
    return len(ranges)


def _chunk_group(
    layout: StepLayout, counts: Sequence[int], keys: KeyTables, first_token: int
) -> QueryGroup:
    longest = max(counts)
    members = slice(first_token, first_token + sum(counts))
    positions = layout.positions[members]
    seen_keys = None if layout.last_keys is None else layout.last_keys[members]
    order = None
    if min(counts) < longest:
        index = _padded_index(counts, positions.device)
        positions = positions[index]
        seen_keys = None if seen_keys is None else seen_keys[index]
        order = (first_token + index).flatten()
    return QueryGroup(
        first=first_token,
        sequences=len(counts),
        count=longest,
        positions=positions.view(-1, longest),
        tables=keys.tables,
        first_keys=keys.first_keys,
        last_keys=keys.last_keys,
        order=order,
        seen_keys=None if seen_keys is None else seen_keys.view(-1, longest),
    )


def _padded_index(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the index [sequences, longest] of each token among those of the group.

    Sequences with fewer tokens repeat their last one.
    """
    sizes = torch.tensor(counts, device=device)
    offsets = torch.arange(max(counts), device=device)
    starts = sizes.cumsum(0) - sizes
    return offsets.minimum(sizes[:, None] - 1) + starts[:, None]


# ---- block tables --------------------------------------------------------------------------------


def _key_tables(
    layout: StepLayout,
    kv: GroupLayout,
    members: slice | torch.Tensor,
    ranges: Sequence[BlockRange],
) -> KeyTables:
    """Return the part of the members' block tables that their queries see."""
    tables = kv.block_tables[members]
    width = max([blocks.end - blocks.first for blocks in ranges])
    first, first_seen, end, last_keys = torch.tensor(ranges, device=tables.device).T
    if kv.window is None:
        return KeyTables(tables[:, :width], None, last_keys)
    entries = first[:, None] + torch.arange(width, device=tables.device)
    is_visible = (entries >= first_seen[:, None]) & (entries < end[:, None])
    gathered = tables.gather(1, entries.clamp(max=tables.shape[1] - 1))
    return KeyTables(gathered.where(is_visible, 0), first * layout.block_size, last_keys)
