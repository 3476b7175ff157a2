"""ImageStore: images in use stay, the others leave in the order of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from engine.vision.store import ImageStore


def embeddings(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def add(store: ImageStore, digest: bytes, size: int) -> None:
    store.hold([(digest, size)])
    store.add(digest, embeddings(size))


def test_store_keeps_released_images_until_their_room_is_needed() -> None:
    store = ImageStore(100)
    add(store, b"a", 40)
    add(store, b"b", 40)
    store.release([b"a"])
    store.release([b"b"])
    assert store.find(b"a") is not None  # now b was used longest ago
    add(store, b"c", 30)
    assert store.find(b"b") is None
    assert store.find(b"a") is not None
    assert store.num_bytes == 70
    store.check()


def test_store_never_drops_an_image_that_a_request_holds() -> None:
    store = ImageStore(100)
    add(store, b"a", 60)
    assert store.has_room([(b"b", 40)])
    assert not store.has_room([(b"b", 41)])
    assert store.has_room([(b"a", 60), (b"b", 40)]), "an image that is held needs no more room"
    store.hold([(b"a", 60)])
    store.release([b"a"])
    assert not store.has_room([(b"b", 41)]), "another request still holds it"
    store.release([b"a"])
    assert store.has_room([(b"b", 41)])
    store.check()


def test_store_holds_an_image_twice_in_one_request() -> None:
    store = ImageStore(100)
    twice = [(b"a", 60), (b"a", 60)]
    assert store.has_room(twice)
    store.hold(twice)
    store.add(b"a", embeddings(60))
    store.release([b"a", b"a"])
    store.check()
    assert store.find(b"a") is not None


def test_store_with_thousands_of_images_counts_its_bytes_without_a_look_at_each() -> None:
    """Every step reports the bytes, and an image may be as small as one token."""

    class Counted(OrderedDict[bytes, torch.Tensor]):
        looks = 0

        def values(self) -> Any:
            Counted.looks += 1
            return super().values()

        def __iter__(self) -> Iterator[bytes]:
            for key in super().__iter__():
                Counted.looks += 1
                yield key

    store = ImageStore(1000)
    store._unused = Counted()
    for number in range(1000):
        add(store, b"%d" % number, 1)
        store.release([b"%d" % number])
    assert store.num_bytes == 1000
    add(store, b"large", 3)
    assert store.num_bytes == 1000
    assert Counted.looks == 3
    assert store.find(b"2") is None
    assert store.find(b"3") is not None
    store.check()
