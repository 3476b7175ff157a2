"""ImageStore: the embeddings of images, of those in use and of the images used last."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

import torch


class ImageStore:
    """Embeddings by the digest of their image, at most `capacity` bytes in all.

    Images of unfinished requests are held and stay. The others are kept until their room is needed;
    the one used longest ago goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: dict[bytes, torch.Tensor] = {}  # embeddings of held images
        self._unused: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._held: Counter[bytes] = Counter()
        self._sizes: dict[bytes, int] = {}  # bytes of held images, also before they are encoded
        # Sums, so that thousands of small images cost a step nothing.
        self._held_bytes = self._used_bytes = self._unused_bytes = 0
        self.num_encoded = self.num_reused = 0  # images, since the start

    @property
    def num_bytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return self._used_bytes + self._unused_bytes

    def has_room(self, sizes: Iterable[tuple[bytes, int]]) -> bool:
        """Return whether images, given with their bytes, fit in addition to those that are held."""
        new = {digest: size for digest, size in sizes if digest not in self._held}
        return self._held_bytes + sum(new.values()) <= self.capacity

    def hold(self, sizes: Collection[tuple[bytes, int]]) -> None:
        """Keep the images of a request from now on; `has_room` has said that they fit."""
        for digest, size in sizes:
            self._held[digest] += 1
            if self._held[digest] == 1:
                self._sizes[digest] = size
                self._held_bytes += size
                if digest in self._unused:
                    self._keep(digest, self._drop_unused(digest))
        while self._held_bytes + self._unused_bytes > self.capacity:
            self._drop_unused(next(iter(self._unused)))

    def release(self, digests: Iterable[bytes]) -> None:
        """End what `hold` began."""
        for digest in digests:
            self._held[digest] -= 1
            if self._held[digest]:
                continue
            del self._held[digest]
            self._held_bytes -= self._sizes.pop(digest)
            embeddings = self._used.pop(digest, None)
            if embeddings is not None:
                self._used_bytes -= embeddings.nbytes
                self._unused[digest] = embeddings
                self._unused_bytes += embeddings.nbytes

    def drop(self, digests: Iterable[bytes]) -> None:
        """Keep those of these images no longer that no request holds."""
        for digest in digests:
            if digest in self._unused:
                self._drop_unused(digest)

    def find(self, digest: bytes) -> torch.Tensor | None:
        """Return the embeddings [N, width] of an image; None if they are not kept."""
        if digest in self._unused:
            self._unused.move_to_end(digest)
            return self._unused[digest]
        return self._used.get(digest)

    def add(self, digest: bytes, embeddings: torch.Tensor) -> None:
        """Keep the embeddings of an image that is held."""
        assert digest in self._held, "no request holds this image"
        self._keep(digest, embeddings)
        self.num_encoded += 1

    def _keep(self, digest: bytes, embeddings: torch.Tensor) -> None:
        assert digest not in self._used
        self._used[digest] = embeddings
        self._used_bytes += embeddings.nbytes

    def _drop_unused(self, digest: bytes) -> torch.Tensor:
        embeddings = self._unused.pop(digest)
        self._unused_bytes -= embeddings.nbytes
        return embeddings

    def check(self) -> None:
        """Assert the invariants."""
        assert self._held.keys() == self._sizes.keys() >= self._used.keys()
        assert not self._held.keys() & self._unused.keys()
        assert all(count > 0 for count in self._held.values())
        assert self._held_bytes == sum(self._sizes.values())
        assert self._used_bytes == sum(each.nbytes for each in self._used.values())
        assert self._unused_bytes == sum(each.nbytes for each in self._unused.values())
        assert self._held_bytes + self._unused_bytes <= self.capacity
