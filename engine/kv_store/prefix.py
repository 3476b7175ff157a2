"""Which blocks a prompt needs in order to begin behind its longest known prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.protocol.ready import KVGroup
from engine.scheduling.block_pool import cache_key


def longest_prefix(
    hashes: Sequence[bytes],
    groups: Sequence[KVGroup],
    block_size: int,
    is_known: Callable[[bytes], bool],
) -> int:
    """Return the number of blocks of the longest prefix whose visible blocks are all known.

    `is_known` gets the prefix cache key of a block. The groups are those of a decoder.
    """
    length = len(hashes)
    for number, group in enumerate(groups):
        if group.window is None:
            for index in range(length):
                if not is_known(cache_key(hashes[index], number)):
                    length = index
                    break
    while length:
        firsts = _first_visible(groups, length, block_size)
        missing = [
            index
            for number, group in enumerate(groups)
            if group.window is not None
            for index in range(firsts[number], length)
            if not is_known(cache_key(hashes[index], number))
        ]
        if not missing:
            return length
        length = max(missing)  # every longer prefix needs that block
    return 0


def visible_keys(
    hashes: Sequence[bytes], groups: Sequence[KVGroup], block_size: int
) -> list[bytes]:
    """Return the keys of the blocks that a token behind all of `hashes` sees, in their order."""
    firsts = _first_visible(groups, len(hashes), block_size)
    return [
        cache_key(digest, number)
        for index, digest in enumerate(hashes)
        for number in range(len(groups))
        if index >= firsts[number]
    ]


def _first_visible(groups: Sequence[KVGroup], length: int, block_size: int) -> list[int]:
    return [group.first_visible_block(length * block_size, block_size) for group in groups]
