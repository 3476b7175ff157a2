"""Shares: no tenant can take all of a resource."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client.shares import Shares


def filled(shares: Shares, tenant: str) -> int:
    """Take one at a time until the tenant may take no more; return what it holds."""
    while shares.may_take(tenant):
        shares.take(tenant)
    return shares.held(tenant)


@pytest.mark.parametrize(("tenants", "held"), [("a", [6]), ("ab", [6, 3]), ("abc", [6, 3, 2])])
def test_shares_each_tenant_leaves_room_for_the_next(tenants: str, held: list[int]) -> None:
    shares = Shares(12)
    assert [filled(shares, tenant) for tenant in tenants] == held


def test_shares_one_tenant_without_keys_may_take_all() -> None:
    assert filled(Shares(12), "") == 12


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_shares_small_capacity_goes_to_the_first(capacity: int) -> None:
    shares = Shares(capacity)
    assert filled(shares, "a") == min(capacity, 1)
    assert shares.may_take("b") == (capacity == 2)


@given(
    capacity=st.integers(2, 50),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans())),
)
def test_shares_a_tenant_that_takes_one_leaves_as_much_as_it_holds(
    capacity: int, steps: list[tuple[str, int, bool]]
) -> None:
    shares = Shares(capacity)
    for tenant, amount, takes in steps:
        if takes:
            for _ in range(amount):
                free = shares.capacity - shares.total
                if free and shares.may_take(tenant):
                    shares.take(tenant)
                    assert shares.held(tenant) <= free
        else:
            shares.give_back(tenant, min(amount, shares.held(tenant)))
        assert sum(held for _, held in shares) == shares.total <= capacity


def test_shares_largest_is_the_tenant_that_holds_most() -> None:
    shares = Shares(12)
    shares.take("a", 3)
    shares.take("b", 5)
    assert shares.largest == "b"
    shares.give_back("b", 5)
    assert shares.largest == "a"
