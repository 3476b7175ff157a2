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
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._held: Counter[bytes] = Counter()
        self._sizes: dict[bytes, int] = {}  # bytes of held images, also before they are encoded
        self.num_encoded = self.num_reused = 0  # images, since the start

    @property
    def num_bytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return sum(each.nbytes for each in self._kept.values())

    def has_room(self, sizes: Iterable[tuple[bytes, int]]) -> bool:
        """Return whether images, given with their bytes, fit in addition to those that are held."""
        new = {digest: size for digest, size in sizes if digest not in self._held}
        return sum(self._sizes.values()) + sum(new.values()) <= self.capacity

    def hold(self, sizes: Collection[tuple[bytes, int]]) -> None:
        """Keep the images of a request from now on; `has_room` has said that they fit."""
        for digest, size in sizes:
            self._held[digest] += 1
            self._sizes[digest] = size
        held = sum(self._sizes.values())
        unused = [digest for digest in self._kept if digest not in self._held]
        left = sum(self._kept[digest].nbytes for digest in unused)
        for digest in unused:
            if held + left <= self.capacity:
                return
            left -= self._kept.pop(digest).nbytes

    def release(self, digests: Iterable[bytes]) -> None:
        """End what `hold` began."""
        for digest in digests:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest], self._sizes[digest]

    def drop(self, digests: Iterable[bytes]) -> None:
        """Keep those of these images no longer that no request holds."""
        for digest in digests:
            if digest not in self._held:
                self._kept.pop(digest, None)

    def find(self, digest: bytes) -> torch.Tensor | None:
        """Return the embeddings [N, width] of an image; None if they are not kept."""
        embeddings = self._kept.get(digest)
        if embeddings is not None:
            self._kept.move_to_end(digest)
        return embeddings

    def add(self, digest: bytes, embeddings: torch.Tensor) -> None:
        """Keep the embeddings of an image that is held."""
        assert digest in self._held, "no request holds this image"
        self._kept[digest] = embeddings
        self.num_encoded += 1

    def check(self) -> None:
        """Assert the invariants."""
        assert self._held.keys() == self._sizes.keys()
        assert all(count > 0 for count in self._held.values())
        unused = [each.nbytes for key, each in self._kept.items() if key not in self._held]
        assert sum(self._sizes.values()) + sum(unused) <= self.capacity
