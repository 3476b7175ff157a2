"""The longest prefix of blocks in memory or in files is that which the block tables would match."""

from __future__ import annotations

import random
from functools import partial

from engine.kv_store.prefix import longest_prefix, visible_keys
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.ready import KVGroup
from engine.scheduling.block_pool import BlockHasher, BlockPool, cache_key
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.sequence import Sequence

SIZE = 4
LAYOUTS = [
    (KVGroup(1),),
    (KVGroup(1), KVGroup(1)),
    (KVGroup(1), KVGroup(1, window=6)),
    (KVGroup(1, window=9), KVGroup(1, window=3)),
]


def is_in(pool: BlockPool, key: bytes) -> bool:
    return bool(pool.find(key))


def test_longest_prefix_equals_that_of_the_block_tables() -> None:
    rng = random.Random(1)
    lengths = set()
    for number in range(300):
        groups = LAYOUTS[number % len(LAYOUTS)]
        pool = BlockPool(64)
        tables = BlockTables(pool, BlockHasher(SIZE, b"k"), groups, SIZE, 64)
        params = SamplingParams(max_tokens=1)
        sequence = Sequence(GenerateRequest(1, list(range(8 * SIZE + 1)), params, 0.0))
        tables.num_cached(sequence)
        keys = [cache_key(each, group) for each in sequence.hashes for group in range(len(groups))]
        for key in rng.sample(keys, rng.randrange(len(keys) // 2, len(keys) + 1)):
            [block] = pool.allocate(1)
            pool.register(block, key)
        found = longest_prefix(sequence.hashes, groups, SIZE, partial(is_in, pool))
        assert found * SIZE == tables.num_cached(sequence)
        assert all(pool.find(key) for key in visible_keys(sequence.hashes[:found], groups, SIZE))
        lengths.add(found)
    assert lengths == set(range(9))


def test_visible_keys_leave_out_what_a_window_has_passed() -> None:
    hashes = [bytes([number]) * 16 for number in range(4)]
    keys = visible_keys(hashes, (KVGroup(1), KVGroup(1, window=5)), SIZE)
    assert keys == [
        *(cache_key(hashes[index], 0) for index in range(3)),
        cache_key(hashes[3], 0),
        cache_key(hashes[3], 1),
    ]
