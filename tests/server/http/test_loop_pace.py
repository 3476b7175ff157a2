"""LoopPace, and the small bodies that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from server.http.large_bodies import SMALL_AT_ONCE, LargeBodies
from server.http.loop_pace import LoopPace

CALLERS = 7


async def begun_by_turn(wait: Callable[[], Awaitable[None]], count: int = CALLERS) -> list[int]:
    """Return how many of `count` callers, which arrive together, go on in each turn of the loop."""
    turns, number = [], 0

    async def caller() -> None:
        await wait()
        turns.append(number)

    tasks = [asyncio.create_task(caller()) for _ in range(count)]
    while len(turns) < count:
        await asyncio.sleep(0)
        number += 1
    await asyncio.gather(*tasks)
    assert turns == sorted(turns)
    return [turns.count(each) for each in sorted(set(turns))]


async def test_callers_go_on_a_few_in_each_turn() -> None:
    pace = LoopPace(3)
    assert await begun_by_turn(pace.wait) == [3, 3, 1]
    assert await begun_by_turn(pace.wait, 2) == [2], "an idle loop lets callers go on at once"


async def test_caller_that_leaves_takes_no_place_and_the_others_keep_their_order() -> None:
    pace = LoopPace(1)
    order: list[int] = []

    async def caller(number: int) -> None:
        await pace.wait()
        order.append(number)

    tasks = [asyncio.create_task(caller(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert order == [0, 1, 3]
    await asyncio.wait_for(pace.wait(), 5)


async def test_crowd_of_small_bodies_is_parsed_a_few_in_each_turn() -> None:
    bodies = LargeBodies()

    async def small() -> None:
        async with bodies.turn(10, ""):
            pass

    assert max(await begun_by_turn(small)) == SMALL_AT_ONCE < CALLERS
