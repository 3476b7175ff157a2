"""Property tests of BlockPool against a model made of dicts and lists, and of its hashes."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.block_pool import BlockHasher, BlockPool
from tests.support.thorough import examples

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocates and releases tables; the model predicts each result of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.lru: list[int] = []  # cached blocks, in order of eviction
        self.name_of: dict[int, bytes] = {}
        self.digests = 0

    def held(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @property
    def free(self) -> set[int]:
        held = {block for table in self.tables for block in table}
        return set(range(1, NUM_BLOCKS + 1)) - held - set(self.lru)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = self.free
        if count > len(free) + len(self.lru):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        evicted = self.lru[: max(count - len(free), 0)]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(blocks) <= free | set(evicted), "a newer cached block was taken"
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.lru.remove(block)
            del self.name_of[block]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Start a new table with the cached or held blocks that lookup finds."""
        names = list(self.name_of.values())
        wanted = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        found = self.pool.lookup([*wanted, b"unknown", *names])
        blocks = {name: block for block, name in self.name_of.items()}
        assert found == [blocks[name] for name in wanted]
        assert self.pool.num_idle(found) == sum(block in self.lru for block in found)
        self.pool.hold(found)
        self.lru = [block for block in self.lru if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for block in reversed(table):  # the tail is evicted first
            if not self.held(block) and block in self.name_of:
                self.lru.append(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), duplicate=st.booleans())
    def register(self, data: st.DataObject, duplicate: bool) -> None:
        block = data.draw(st.sampled_from(sorted({b for table in self.tables for b in table})))
        names = list(self.name_of.values())
        if duplicate and names:
            name = data.draw(st.sampled_from(names))
        else:
            self.digests += 1
            name = b"%d" % self.digests
        self.pool.register(block, name)
        if name not in names and block not in self.name_of:
            self.name_of[block] = name

    @rule(block=st.integers(1, NUM_BLOCKS))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.name_of.pop(block, None)
        if block in self.lru:
            self.lru.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_cached == len(self.lru)
        assert self.pool.num_available == len(self.free) + len(self.lru)
        assert self.pool.num_held == NUM_BLOCKS - self.pool.num_available
        for block in range(1, NUM_BLOCKS + 1):
            assert self.pool.is_shared(block) == (self.held(block) > 1)
        for block, name in self.name_of.items():
            assert self.pool.lookup([name]) == [block]

    def teardown(self) -> None:
        while self.tables:
            self.pool.release(self.tables.pop())
        assert self.pool.num_available == NUM_BLOCKS, "a released block is lost"


TestBlockPool = BlockPoolMachine.TestCase
# Deterministic on every machine; a failure prints its steps as code.
TestBlockPool.settings = settings(
    derandomize=True, max_examples=examples(100), stateful_step_count=40, deadline=None
)


def test_check_wrong_reference_count_fails() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check([table])
    for tables in ([], [table, table], [table[:1]], [[*table, 3]]):
        with pytest.raises(AssertionError):
            pool.check(tables)


def test_release_block_without_reference_fails() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError):
        pool.release(table)


def test_allocate_evicts_tail_of_prefix_before_its_head() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    for index, block in enumerate(table):
        pool.register(block, b"%d" % index)
    pool.release(table)
    pool.allocate(2)
    assert pool.lookup([b"0", b"1", b"2", b"3"]) == table[:2]


def test_allocate_evicts_recently_used_prefix_last() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.register(old[0], b"old")
    pool.register(new[0], b"new")
    pool.release(old)
    pool.release(new)
    pool.hold(old)
    pool.release(old)
    assert pool.allocate(1) == new


def test_find_part_returns_the_last_registered_block_that_is_still_known() -> None:
    pool = BlockPool(3)
    old, new, duplicate = pool.allocate(3)
    pool.register(old, b"old", [b"first", b"second"])
    pool.register(new, b"new", [b"first", b"other"])
    pool.register(duplicate, b"new", [b"first", b"other"])
    parts = (b"first", b"second", b"other", b"unknown")
    assert [pool.find_part(part) for part in parts] == [new, old, new, 0]
    pool.forget(new)
    assert [pool.find_part(part) for part in parts] == [0, old, 0, 0]
    pool.forget(old)
    assert [pool.find_part(part) for part in parts] == [0, 0, 0, 0]
    pool.check([[old, new, duplicate]])


def hashes(tokens: list[int], salt: str = "", key: bytes = b"key", size: int = 4) -> list[bytes]:
    result: list[bytes] = []
    BlockHasher(size, key).extend(result, tokens, salt.encode())
    return result


def test_hash_depends_on_its_block_and_all_tokens_before() -> None:
    tokens = list(range(12))
    base = hashes(tokens)
    assert len(base) == 3
    assert len(set(base)) == 3
    for position in range(12):
        changed = hashes([*tokens[:position], 99, *tokens[position + 1 :]])
        same = [a == b for a, b in zip(base, changed, strict=True)]
        assert same == [index < position // 4 for index in range(3)]
    # Equal content at another position is another block.
    assert len(set(hashes([1, 2, 3, 4] * 3))) == 3


def test_hash_other_salt_or_key_changes_every_hash() -> None:
    tokens = list(range(12))
    variants = [hashes(tokens), hashes(tokens, salt="a"), hashes(tokens, salt="b")]
    variants.append(hashes(tokens, key=b"other"))
    assert len({digest for variant in variants for digest in variant}) == 12


def test_hash_growing_sequence_hashes_full_blocks_to_the_same_chain() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(50_000) for _ in range(50)]
    hasher, grown = BlockHasher(4, b"key"), []
    for length in range(51):
        hasher.extend(grown, tokens[:length], b"salt")
        assert len(grown) == length // 4
    assert grown == hashes(tokens, salt="salt")


def test_root_source_and_salt_with_equal_bytes_differ() -> None:
    """The last tokens of a source can equal the first bytes of a longer salt."""
    hasher = BlockHasher(4, b"key")
    pairs = [
        ([5, 6], "\x01\0\0\0"),
        ([5, 6, 1], ""),
        ([5], "\x06\0\0\0\x01\0\0\0"),
        ([5, 6, 1], "a"),
    ]
    roots = {hasher.root(salt, source) for source, salt in pairs}
    assert len(roots) == len(pairs)
