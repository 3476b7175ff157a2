"""ResponseStore: bounds, the order of eviction, and the separation of tenants."""

from __future__ import annotations

import tracemalloc

import pytest

from server.api.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse


def response(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    return StoredResponse(name, previous, b"x" * size, b"[]")


def names(store: ResponseStore, *candidates: str) -> str:
    """Return the candidates that are stored. Does not change the order of use."""
    return "".join(name for name in candidates if name in store._responses.get("", {}))


@pytest.mark.slow
def test_add_100_000_responses_stays_within_bytes() -> None:
    most = 8 << 20
    store = ResponseStore(most, 10**9)
    tracemalloc.start()
    try:
        for number in range(100_000):
            previous = f"resp_{number - 1:032x}" if number % 4 else None
            name = f"resp_{number:032x}"
            store.add(f"tenant {number % 3}", StoredResponse(name, previous, b"b" * 500, b"i" * 99))
            assert store.bytes <= most
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= most
    assert len(store) > 1000


def test_add_100_000_responses_stays_within_number() -> None:
    store = ResponseStore(2**40, 1000)
    for number in range(100_000):
        store.add("", response(f"resp_{number}"))
    assert len(store) == 1000
    assert store.bytes == 1000 * (ENTRY_BYTES + 2)


def test_add_evicts_the_least_recently_used() -> None:
    store = ResponseStore(2**30, 3)
    for name in "abc":
        store.add("", response(name))
    assert store.get("", "a") is not None
    store.add("", response("d"))
    assert names(store, *"abcd") == "acd"


def test_add_response_larger_than_the_store_keeps_the_others() -> None:
    store = ResponseStore(10_000, 10)
    store.add("", response("a"))
    store.add("", response("b", size=10_000))
    assert names(store, *"ab") == "a"


def test_eviction_keeps_what_a_stored_response_continues() -> None:
    """A chain loses its last response first; otherwise no response of it could be continued."""
    store = ResponseStore(2**30, 4)
    store.add("", response("a"))
    store.add("", response("b", "a"))
    store.add("", response("x"))
    store.add("", response("c", "b"))
    store.add("", response("y"))
    assert names(store, *"abcxy") == "abcy"
    store.add("", response("z"))
    assert names(store, *"abcyz") == "abyz"
    assert [each.id for each in store.conversation("", "b")] == ["a", "b"]


def test_conversation_begins_with_the_first_response() -> None:
    store = ResponseStore(2**30, 10)
    store.add("", response("a"))
    store.add("", response("b", "a"))
    store.add("", response("c", "b"))
    assert [each.id for each in store.conversation("", "c")] == ["a", "b", "c"]


def test_conversation_names_the_missing_response() -> None:
    store = ResponseStore(2**30, 10)
    store.add("", response("a"))
    store.add("", response("b", "a"))
    assert store.remove("", "a")
    for name, missing in (("b", "a"), ("unknown", "unknown")):
        with pytest.raises(KeyError) as error:
            store.conversation("", name)
        assert error.value.args == (missing,)


def test_tenants_do_not_see_each_others_responses() -> None:
    store = ResponseStore(2**30, 10)
    store.add("one", response("a"))
    assert store.get("two", "a") is None
    assert not store.remove("two", "a")
    with pytest.raises(KeyError):
        store.conversation("two", "a")
    assert store.get("one", "a") == response("a")


def test_remove_frees_the_bytes() -> None:
    store = ResponseStore(2**30, 10)
    store.add("", response("a", size=100))
    assert store.remove("", "a")
    assert (len(store), store.bytes) == (0, 0)
    assert not store.remove("", "a")


def test_add_same_id_again_counts_it_once() -> None:
    store = ResponseStore(2**30, 10)
    store.add("", response("a", size=100))
    store.add("", response("a", size=10))
    assert store.bytes == response("a", size=10).size


def test_eviction_takes_from_the_tenant_that_holds_most() -> None:
    for store in (ResponseStore(2**30, 8), ResponseStore(8 * (ENTRY_BYTES + 2), 1000)):
        store.add("b", response("x"))
        for number in range(50):
            store.add("a", response(f"{number}"))
        store.add("c", response("y"))
        assert store.get("b", "x") is not None
        assert store.get("c", "y") is not None
        assert [number for number in range(50) if store.get("a", f"{number}")] == list(
            range(44, 50)
        )
        assert len(store) == 8


def test_eviction_of_a_large_response_takes_no_more_than_its_tenants_share() -> None:
    store = ResponseStore(10 * ENTRY_BYTES, 100)
    for number in range(4):
        store.add("b", response(f"{number}"))
    store.add("a", response("large", size=7 * ENTRY_BYTES))
    assert store.get("a", "large") is None
    assert all(store.get("b", f"{number}") for number in range(4))
