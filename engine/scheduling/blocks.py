"""BlockPool: who holds which KV block, and which content can be found again.

A block is in exactly one of three states: free (content forgotten), cached (free to take, content
known under its hash, least recently used first) or held (reference count above zero). Block 0 is
the null block that pads tables; it is never handed out.

A prefix is identified by a chain of keyed hashes over full blocks, so a hash names a block's tokens
and everything before them. Two blocks may hold the same content: the first keeps the name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile


class BlockHasher:
    """Hash chain over blocks of tokens, keyed so that no client can make two prompts collide."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self.block_size = block_size
        self._key = key

    def root(self, salt: str, source: Sequence[int]) -> bytes:
        """What all hashes of a sequence rest on: its tenant, and the source its answer is about."""
        tenant = salt.encode()
        # A source has any length: its last tokens must not be read as the beginning of a salt.
        return self._digest(source, self._digest((), tenant)) if source else tenant

    def extend(self, hashes: list[bytes], tokens: Sequence[int], root: bytes) -> None:
        """Append to `hashes` those of the full blocks of `tokens` it does not cover yet."""
        size = self.block_size
        for index in range(len(hashes), len(tokens) // size):
            parent = hashes[-1] if hashes else root
            hashes.append(self._digest(tokens[index * size : (index + 1) * size], parent))

    def _digest(self, tokens: Sequence[int], parent: bytes) -> bytes:
        digest = hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16, key=self._key)
        digest.update(parent)
        return digest.digest()


class BlockPool:
    """Reference counts, the free list and the prefix cache over `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of this chain; holds nothing."""
        return list(takewhile(bool, map(self.find, hashes)))

    def find(self, digest: bytes) -> int:
        """The block of this content, or 0; holds nothing."""
        return self._block_of.get(digest, 0)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these would leave the available ones if they were held."""
        return sum(block in self._cached for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these, cached or held, blocks."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of forgotten content, each with one reference."""
        assert count <= self.num_available
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. The tail of a table is evicted before its head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def register(self, block: int, digest: bytes) -> None:
        """This held block, full of known tokens, can be found by its hash from now on."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        """This block's content must not be found again."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given the block tables of all sequences."""
        counts = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._references, "a reference count differs from the tables"
        assert counts[0] == 0, "the null block is in a table"
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(counts) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held, "a free block is in a table"
        assert not cached & (free | held), "a cached block has a second state"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        assert not free & self._hash_of.keys(), "a free block can still be found"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, (
            "hashes and blocks differ"
        )
