"""TenantStore: its bounds, its order, and the tenant that makes room."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.tenant_store import TenantStore


@dataclass(frozen=True)
class Item:
    size: int


def store_of(max_bytes: int, max_entries: int) -> TenantStore[Item]:
    return TenantStore(max_bytes, max_entries)


def test_make_room_drops_the_least_recently_used_of_the_largest_tenant() -> None:
    store = store_of(100, 99)
    store.put("small", "a", Item(10))
    for name in "bcd":
        store.put("large", name, Item(30))
    store.use("large", "b")
    store.put("small", "e", Item(5))
    store.make_room()
    assert list(store.get("large", {})) == ["d", "b"]
    assert list(store.get("small", {})) == ["a", "e"]
    assert (store.bytes, len(store)) == (75, 4)


def test_put_of_a_known_id_replaces_it() -> None:
    store = store_of(100, 99)
    store.put("", "a", Item(30))
    store.put("", "a", Item(10))
    assert (store.bytes, len(store), store.find("", "a")) == (10, 1, Item(10))


def test_drop_of_the_last_entry_forgets_the_tenant() -> None:
    store = store_of(100, 99)
    store.put("one", "a", Item(30))
    assert not store.drop("other", "a")
    assert store.drop("one", "a")
    assert not store.drop("one", "a")
    assert store.get("one", {"x": Item(1)}) == {"x": Item(1)}
    assert store.bytes == 0


def test_has_room_for_compares_with_the_whole_store() -> None:
    store = store_of(100, 99)
    store.put("", "a", Item(90))
    assert store.has_room_for(Item(100))
    assert not store.has_room_for(Item(101))
