"""BlockPool: reference counts of KV blocks, and the prefix cache over them.

A block is in exactly one of three states. A free block has no known content. A cached block can be
allocated, but its hash still finds it; the least recently used one is evicted first. A held block
has a reference count above zero. Block 0 is the null block that pads tables. It is never allocated.

A prefix is identified by a chain of keyed hashes over full blocks, so a hash identifies a block's
tokens and all tokens before them. Two blocks may hold the same content; only the first is findable.
A block is also found by its first tokens, which can be copied to another block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from engine.protocol.generate import Image
from engine.protocol.journal import BlockEvent, BlockEventKind


class BlockHasher:
    """Hash chain over blocks of tokens. The key prevents clients from constructing collisions."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self.block_size = block_size
        self._key = key

    def root(
        self,
        salt: str,
        encoder_prompt: Sequence[int],
        adapter: int = 0,
        ablation_key: Sequence[int] = (),
    ) -> bytes:
        """Return the parent of a sequence's first hash: of its tenant, adapter and source, and of
        its ablation."""
        tenant = salt.encode()
        if adapter:
            tenant = self._digest((-1, adapter), tenant)  # no block has a negative token
        if ablation_key:
            tenant = self._digest(ablation_key, tenant)
        # Hash the tenant first: sources have any length, so joining both would be ambiguous.
        return self._digest(encoder_prompt, self._digest((), tenant)) if encoder_prompt else tenant

    def extend(
        self,
        hashes: list[bytes],
        tokens: Sequence[int],
        root: bytes,
        images: Sequence[Image] = (),
    ) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` does not cover yet."""
        size = self.block_size
        for index in range(len(hashes), len(tokens) // size):
            start = index * size
            parent = self._shows(hashes[-1] if hashes else root, images, start, start + size)
            hashes.append(self._digest(tokens[start : start + size], parent))

    def parts(
        self,
        tokens: Sequence[int],
        size: int,
        parent: bytes,
        index: int = 0,
        images: Sequence[Image] = (),
    ) -> list[bytes]:
        """Return the hashes of the first `size` tokens, of the first 2 * `size`, and so on.

        They are those of block `index`.
        """
        start = index * self.block_size
        ends = range(size, len(tokens) + 1, size)
        return [
            self._digest(tokens[:end], self._shows(parent, images, start, start + end))
            for end in ends
        ]

    def _shows(self, parent: bytes, images: Sequence[Image], start: int, end: int) -> bytes:
        """Return the parent of a hash of the tokens [start, end): also of the images they show.

        The tokens of all images are equal, and only their embeddings differ.
        """
        digests = [image.digest for image in images if image.overlaps(start, end)]
        if not digests:
            return parent
        return self._digest((-3, len(digests)), parent + b"".join(digests))

    def _digest(self, tokens: Sequence[int], parent: bytes) -> bytes:
        digest = hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16, key=self._key)
        digest.update(parent)
        return digest.digest()


class BlockPool:
    """Reference counts, free list and prefix cache of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.journal: list[BlockEvent] | None = None  # None without a viewer
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._parts_of: dict[int, Sequence[bytes]] = {}  # hashes of a block's first tokens
        self._block_with: dict[bytes, int] = {}  # the last registered block of each of these

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def note(self, kind: BlockEventKind, number: int) -> None:
        """Note what happens to a block or a sequence, for a viewer."""
        if self.journal is not None:
            self.journal.append(BlockEvent(kind, number))

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of this chain, without holding them."""
        return list(takewhile(bool, map(self.find, hashes)))

    def find(self, digest: bytes) -> int:
        """Return the block with this hash without holding it, or 0 if there is none."""
        return self._block_of.get(digest, 0)

    def find_part(self, digest: bytes) -> int:
        """Return a block whose first tokens have this hash, or 0 if there is none."""
        return self._block_with.get(digest, 0)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are cached: holding them would reduce num_available."""
        return sum(block in self._cached for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are cached or held."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks without known content, each with one reference."""
        assert count <= self.num_available
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._victim()
                del self._cached[block]
                self.forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _victim(self) -> int:
        """Return the cached block that is evicted next: the least recently used one."""
        return next(iter(self._cached))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. A table's tail is evicted before its head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    @property
    def findable(self) -> list[int]:
        """The blocks that the prefix cache finds by their hashes, held or not."""
        return list(self._hash_of)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def register(self, block: int, digest: bytes, parts: Sequence[bytes] = ()) -> None:
        """Make a held block, full of known tokens, findable by its hash and its `parts`."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            self.note("find", block)
            if parts:
                self._parts_of[block] = parts
                self._block_with.update(dict.fromkeys(parts, block))

    def forget(self, block: int) -> None:
        """Forget the content of a block, so that it is not found again."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.note("forget", block)
        for part in self._parts_of.pop(block, ()):
            if self._block_with.get(part) == block:
                del self._block_with[part]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given the block tables of all sequences."""
        counts = [0] * (self.num_blocks + 1)
        held: set[int] = set()
        for table in tables:
            held.update(table)
            for block in table:
                counts[block] += 1
        assert counts == self._references, "a reference count differs from the tables"
        assert counts[0] == 0, "the null block is in a table"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held, "a free block is in a table"
        assert not cached & (free | held), "a cached block is also free or held"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block has no state"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        assert not free & self._hash_of.keys(), "a free block can still be found"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, (
            "hashes and blocks differ"
        )
        assert self._parts_of.keys() <= self._hash_of.keys(), "a part of a block without a hash"
        for part, block in self._block_with.items():
            assert part in self._parts_of[block], "a part is not in its block"


def cache_key(digest: bytes, group: int) -> bytes:
    """Return a block's prefix cache key: the hash of its tokens and prefix, plus its KV group."""
    return digest + group.to_bytes(2, "big")
