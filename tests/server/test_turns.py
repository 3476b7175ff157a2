"""Turns: slots that tenants take in turn."""

from __future__ import annotations

import asyncio

from server.turns import Turns


async def take(turns: Turns, tenant: str, order: list[str]) -> None:
    await turns.acquire(tenant)
    order.append(tenant)


async def test_turns_free_slot_goes_to_the_tenant_that_holds_fewest() -> None:
    turns = Turns(2)
    order: list[str] = []
    tasks = [asyncio.create_task(take(turns, tenant, order)) for tenant in "aaaab"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a", "a"]
    turns.release("a")
    await asyncio.sleep(0)
    assert order == ["a", "a", "b"]
    for tenant in "ab":
        turns.release(tenant)
    await asyncio.gather(*tasks)
    assert order == ["a", "a", "b", "a", "a"]


async def test_turns_of_one_slot_alternate() -> None:
    turns = Turns(1)
    order: list[str] = []
    tasks = [asyncio.create_task(take(turns, tenant, order)) for tenant in "aaaabbc"]
    for _ in tasks:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turns.release(order[-1])
    await asyncio.gather(*tasks)
    assert order == list("abcabaa")


async def test_turns_that_leave_room_give_a_tenant_its_share_only() -> None:
    turns = Turns(8, leaves_room=True)
    order: list[str] = []
    tasks = [asyncio.create_task(take(turns, tenant, order)) for tenant in "a" * 8 + "b" + "c"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(order) == list("aaaabc")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_turns_cancelled_wait_keeps_no_slot() -> None:
    turns = Turns(1)
    await turns.acquire("a")
    waiting = [asyncio.create_task(turns.acquire(tenant)) for tenant in "ab"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.release("a")  # in the moment of the cancellation
    await asyncio.wait(waiting)
    assert waiting[1].exception() is None
    granted = asyncio.create_task(turns.acquire("c"))
    await asyncio.sleep(0)
    turns.release("b")
    granted.cancel()  # it has its slot, but does not know yet
    await asyncio.wait({granted})
    await asyncio.wait_for(turns.acquire("d"), 5)
