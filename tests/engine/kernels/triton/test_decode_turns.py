"""The order in which programs of attention take work, and how long the last one works.

A program works as long as it has keys to read. A GPU has room for PLACES programs, three on each
multiprocessor of an H200, and a program starts when one before it ends.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from engine.kernels.triton.attention_shapes import rows_per_tile
from engine.kernels.triton.decode_turns import (
    SPLIT,
    first_item,
    most_splits,
    next_item,
    size_of,
    split_blocks,
    units_of,
)
from engine.kernels.triton.extend_attention import owner_of

PLACES, KV_HEADS = 396, 8
Item = tuple[int, int]  # (sequence, number)


@triton.jit
def _note_items(
    lengths,
    sequences,
    log,
    width,
    PARTS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    program = tl.program_id(0)
    sequence, item, unit, end, _ = first_item(
        lengths, sequences, PARTS, program, tl.num_programs(0), SEQUENCES, WINDOW
    )
    place = log + program * width
    while unit < end:
        tl.store(place, sequence)
        tl.store(place + 1, item)
        units = units_of(tl.load(lengths + sequence), WINDOW)
        before = unit
        sequence, item, unit = next_item(sequence, item, unit, units, PARTS)
        tl.store(place + 2, unit - before)
        place += 3


def taken(lengths: Sequence[int], programs: int = PLACES) -> list[dict[Item, int]]:
    """Return the items of each program, and the units of each item."""
    width = 3 * 200
    log = torch.full((programs, width), -1, dtype=torch.int32)
    count = triton.next_power_of_2(len(lengths))
    tensor = torch.tensor(lengths, dtype=torch.int32)
    _note_items[(programs,)](tensor, len(lengths), log, width, KV_HEADS, count, None)
    rows = log.view(programs, -1, 3).tolist()
    return [{(s, item): units for s, item, units in row if s >= 0} for row in rows]


def all_items(lengths: Sequence[int]) -> dict[Item, int]:
    """Return the units of every item, from the arithmetic of the splits."""
    items = {}
    for sequence, length in enumerate(lengths):
        units = max(-(-max(length - 16, 0) // 256), 1)
        size = -(-units // 64)
        splits = -(-units // size)
        for item in range(KV_HEADS * splits):
            items[sequence, item] = min(size, units - item % splits * size)
    return items


CASES = {
    "one of 32768 among 255 short": [200] * 100 + [32768] + [200] * 155,
    "a long one last": [200] * 255 + [32768],
    "64 of 1024": [1024] * 64,
    "all lengths": [37 * n % 4000 + 1 for n in range(256)],
    "two long": [32768, 3000, 16400, *[800] * 61],
}


@pytest.mark.parametrize(
    "name",
    ["64 of 1024", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "64 of 1024")],
)
def test_programs_take_each_item_once_and_end_within_a_fifth_of_the_ideal(name: str) -> None:
    lengths = CASES[name]
    programs = taken(lengths)
    items = all_items(lengths)
    counted = Counter(item for program in programs for item in program)
    assert counted == Counter(items.keys())
    for program in programs:
        assert all(items[item] == units for item, units in program.items())
    longest = max(sum(program.values()) for program in programs)
    assert longest <= 1.2 * sum(items.values()) / PLACES


@pytest.mark.slow
def test_one_long_sequence_has_an_item_for_each_program() -> None:
    """512 items of two units, so a program has one or two."""
    programs = taken([32768])
    assert {len(program) for program in programs} == {1, 2}


@triton.jit
def _note_sizes(units, log):
    size, splits = size_of(units)
    tl.store(log, size)
    tl.store(log + 1, splits)


def test_splits_of_a_context_fit_the_memory_that_a_launch_gives_them() -> None:
    log = torch.zeros(2, dtype=torch.int32)
    for keys in (1, 256, 257, 16384, 16385, 40000, 131072):
        _note_sizes[(1,)](-(-keys // SPLIT.value), log)
        size, splits = log.tolist()
        assert splits <= most_splits(keys, None) <= 64
        assert size * SPLIT.value <= 64 * split_blocks(keys, None, 64)
    assert most_splits(10**6, 1000) == 5
    assert split_blocks(10**6, 1000, 64) == 4


@triton.jit
def _note_tiles(starts, sequences, log, QUERIES: tl.constexpr, REVERSED: tl.constexpr):
    _, _, count, first, last, part = owner_of(starts, sequences, QUERIES, REVERSED)
    place = log + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 3
    tl.store(place, tl.minimum(first, count))
    tl.store(place + 1, tl.where(first < count, last, 0))
    tl.store(place + 2, part)


def makespan(work: Sequence[int], places: int) -> int:
    """Return when the last of the programs ends that start in this order on these places."""
    ends = [0] * places
    for each in work:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def test_extend_longest_tiles_first_end_sooner() -> None:
    """A prompt of 2,048 tokens: one program of 8 warps on each of 132 multiprocessors."""
    rows, count = rows_per_tile(4, 128, torch.bfloat16), 2048
    queries = rows // 4
    tiles = count // queries + 1
    starts = torch.tensor([0, count], dtype=torch.int32)
    spans, work = {}, {}
    for is_reversed in (False, True):
        log = torch.zeros(tiles * KV_HEADS, 3, dtype=torch.int32)
        _note_tiles[(tiles, KV_HEADS)](starts, 1, log, queries, is_reversed)
        work[is_reversed] = [last for _, last, _ in log.tolist()]
        spans[is_reversed] = makespan(work[is_reversed], 132)
        assert len({tuple(row) for row in log.tolist()}) == tiles * KV_HEADS
    assert sorted(work[False]) == sorted(work[True])
    ideal = sum(work[True]) / 132
    assert spans[True] <= 1.01 * ideal < 1.02 * ideal <= spans[False]
