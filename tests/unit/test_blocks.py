"""BlockPool against a model of dicts and lists: the invariants of reliability T-43."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.blocks import BlockHasher, BlockPool

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables are taken and given back; the model predicts every answer of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.lru: list[int] = []  # cached blocks, the next to be evicted first
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
        assert set(blocks) <= free | set(evicted), "only free and the oldest cached blocks go"
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.lru.remove(block)
            del self.name_of[block]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A new table begins with what lookup finds, cached or held."""
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
        assert self.pool.num_available == NUM_BLOCKS, "free after all was given back == total"


TestBlockPool = BlockPoolMachine.TestCase
# The same sequences on every machine; a failure prints its steps, ready to paste.
TestBlockPool.settings = settings(
    derandomize=True, max_examples=100, stateful_step_count=40, deadline=None
)


def test_check_notices_a_wrong_count() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check([table])
    for tables in ([], [table, table], [table[:1]], [[*table, 3]]):
        with pytest.raises(AssertionError):
            pool.check(tables)


def test_the_pool_refuses_to_release_what_nobody_holds() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError):
        pool.release(table)


def test_eviction_takes_the_tail_of_a_prefix_before_its_head() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    for index, block in enumerate(table):
        pool.register(block, b"%d" % index)
    pool.release(table)
    pool.allocate(2)
    assert pool.lookup([b"0", b"1", b"2", b"3"]) == table[:2]


def test_using_a_prefix_makes_it_the_last_to_go() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.register(old[0], b"old")
    pool.register(new[0], b"new")
    pool.release(old)
    pool.release(new)
    pool.hold(old)
    pool.release(old)
    assert pool.allocate(1) == new


def hashes(tokens: list[int], salt: str = "", key: bytes = b"key", size: int = 4) -> list[bytes]:
    result: list[bytes] = []
    BlockHasher(size, key).extend(result, tokens, salt.encode())
    return result


def test_a_hash_names_its_tokens_and_everything_before_them() -> None:
    tokens = list(range(12))
    base = hashes(tokens)
    assert len(base) == 3
    assert len(set(base)) == 3
    for position in range(12):
        changed = hashes([*tokens[:position], 99, *tokens[position + 1 :]])
        same = [a == b for a, b in zip(base, changed, strict=True)]
        assert same == [index < position // 4 for index in range(3)]
    # Equal content at another place is another block.
    assert len(set(hashes([1, 2, 3, 4] * 3))) == 3


def test_salt_and_key_change_every_hash() -> None:
    tokens = list(range(12))
    variants = [hashes(tokens), hashes(tokens, salt="a"), hashes(tokens, salt="b")]
    variants.append(hashes(tokens, key=b"other"))
    assert len({digest for variant in variants for digest in variant}) == 12


def test_only_full_blocks_are_hashed_and_growing_gives_the_same_chain() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(50_000) for _ in range(50)]
    hasher, grown = BlockHasher(4, b"key"), []
    for length in range(51):
        hasher.extend(grown, tokens[:length], b"salt")
        assert len(grown) == length // 4
    assert grown == hashes(tokens, salt="salt")


def test_no_source_and_salt_are_read_as_others() -> None:
    """A source's last tokens could be the bytes a longer salt begins with."""
    hasher = BlockHasher(4, b"key")
    pairs = [
        ([5, 6], "\x01\0\0\0"),
        ([5, 6, 1], ""),
        ([5], "\x06\0\0\0\x01\0\0\0"),
        ([5, 6, 1], "a"),
    ]
    roots = {hasher.root(salt, source) for source, salt in pairs}
    assert len(roots) == len(pairs)
