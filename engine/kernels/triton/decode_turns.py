"""The parts of a decode step's attention, and the programs that take them in turn.

An item is one split of one sequence's keys for one kv head. Items have units of SPLIT keys. A
launch has a fixed number of programs. Each takes the items that begin in its share of all units, so
that a long sequence spreads over all programs and short ones leave none without work.

The newest TAIL keys of a sequence are no part of its splits: the last split takes them first. They
include all keys that the launch itself stores, also those of drafted tokens, whose rows follow one
another.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT: tl.constexpr = tl.constexpr(256)
MAX_SPLITS: tl.constexpr = tl.constexpr(64)
TAIL: tl.constexpr = tl.constexpr(16)  # tl.dot's smallest side; a step drafts up to 7 tokens


@triton.jit
def past_of(length, WINDOW: tl.constexpr):
    """Return (first visible key, end of the keys before the tail, origin of the first split)."""
    first = length * 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    past = tl.maximum(length - TAIL, 0)
    return first, past, first // SPLIT * SPLIT


@triton.jit
def units_of(length, WINDOW: tl.constexpr):
    """Return the units of one kv head of a sequence with `length` keys; at least 1."""
    _, past, origin = past_of(length, WINDOW)
    return tl.maximum((past - origin + (SPLIT - 1)) // SPLIT, 1)


@triton.jit
def size_of(units):
    """Return (units per split, number of splits) of a sequence with this many units."""
    size = (units + (MAX_SPLITS - 1)) // MAX_SPLITS
    return size, (units + size - 1) // size


@triton.jit
def first_item(
    lengths, sequences, parts, program, programs, SEQUENCES: tl.constexpr, WINDOW: tl.constexpr
):
    """Return (sequence, item of it, its first unit, end of the program's share, all units).

    Units count from the first sequence on. Item i of a sequence is split i % splits of kv head
    i // splits. SEQUENCES is `sequences`, rounded up to a power of two. A program without an item
    gets a first unit that is not before its end.
    """
    ids = tl.arange(0, SEQUENCES)
    is_real = ids < sequences
    length = tl.load(lengths + ids, is_real, 0)
    units = tl.where(is_real, units_of(length, WINDOW) * parts, 0)
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    begin = (program.to(tl.int64) * total // programs).to(tl.int32)
    end = ((program + 1).to(tl.int64) * total // programs).to(tl.int32)
    sequence = tl.minimum(tl.sum((ends <= begin).to(tl.int32), 0), sequences - 1)
    is_own = ids == sequence
    start = tl.sum(tl.where(is_own, ends - units, 0), 0)
    own_units = tl.sum(tl.where(is_own, units, 0), 0) // parts
    size, splits = size_of(own_units)
    part = (begin - start) // own_units
    split = ((begin - start) % own_units + size - 1) // size
    unit = start + part * own_units + tl.minimum(split * size, own_units)
    item = part * splits + split
    is_over = item == splits * parts  # the next item is of the next sequence
    item = tl.where(is_over, 0, item)
    return tl.where(is_over, sequence + 1, sequence), item, unit, end, total


@triton.jit
def next_item(sequence, item, unit, units, parts):
    """Return (sequence, item of it, its first unit) behind an item of a sequence with `units`."""
    size, splits = size_of(units)
    unit += tl.minimum(size, units - item % splits * size)
    is_over = item + 1 == splits * parts
    return tl.where(is_over, sequence + 1, sequence), tl.where(is_over, 0, item + 1), unit


def most_splits(keys: int, window: int | None) -> int:
    """Return the largest number of splits that a sequence of up to `keys` keys can have."""
    if window is not None:
        keys = min(keys, window + SPLIT.value - 1)  # the first split may begin before the window
    return min(-(-keys // SPLIT.value), MAX_SPLITS.value)


def split_blocks(keys: int, window: int | None, block_size: int) -> int:
    """Return a power of two of blocks that hold any split of a sequence of up to `keys` keys.

    It grows in steps of four times, so that few kernels are compiled.
    """
    if window is not None:
        keys = min(keys, window + SPLIT.value - 1)
    size = SPLIT.value
    while size * MAX_SPLITS.value < keys:
        size *= 4
    return max(size // block_size, 1)
