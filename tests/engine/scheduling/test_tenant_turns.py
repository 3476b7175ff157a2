"""Turns between tenants: the counters alone, and the queues that they order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.embed import EmbedRequest
from engine.scheduling.embed_queue import EmbedQueue
from engine.scheduling.tenant_turns import TenantTurns
from tests.engine.scheduling.simulation import Simulation

LIMITS = {
    "num_blocks": 40,
    "block_size": 4,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


def order_of(simulation: Simulation) -> list[int]:
    simulation.drain()
    return list(simulation.admitted)


def steps_until_token(simulation: Simulation, request_id: int, limit: int) -> int:
    for step in range(1, limit + 1):
        simulation.turn()
        if simulation.outputs[request_id]:
            return step
    raise AssertionError(f"request {request_id} has no token after {limit} steps")


@pytest.mark.parametrize("blocks", [12, 40])  # with and without preemptions
def test_scheduler_thousand_requests_ahead_do_not_delay_another_tenant(blocks: int) -> None:
    """Bound: those that run must end, and one request of each other tenant may come first."""
    simulation = Simulation(**LIMITS | {"num_blocks": blocks, "max_model_len": 40})
    simulation.check = lambda: None  # type: ignore[method-assign]  # quadratic here
    for number in range(1000):
        simulation.add([number % 11, 1, 2, 3], 8, tenant="a")
    for _ in range(5):
        simulation.turn()
    simulation.scheduler.check()
    late = simulation.add([5, 6, 7], 4, tenant="b")
    assert late is not None
    assert steps_until_token(simulation, late, 40) <= 24
    simulation.scheduler.check()


@given(
    backlog=st.integers(1, 60),
    prompt=st.integers(1, 30),
    answer=st.integers(1, 20),
    run=st.integers(0, 12),
    blocks=st.integers(20, 60),
    depth=st.integers(0, 1),
)
def test_scheduler_first_token_of_a_new_tenant_does_not_depend_on_the_backlog(
    backlog: int, prompt: int, answer: int, run: int, blocks: int, depth: int
) -> None:
    def steps(num_waiting: int) -> int:
        simulation = Simulation(depth=depth, **LIMITS | {"num_blocks": blocks})
        for number in range(num_waiting):
            simulation.add([number % 11] * prompt, answer, tenant="a")
        for _ in range(run):
            simulation.turn()
        late = simulation.add([5, 6, 7], 4, tenant="b")
        assert late is not None
        return steps_until_token(simulation, late, 500)

    # The prompts and answers of the four rows, and of one turn of the other tenant.
    assert steps(backlog) <= 5 * (answer + prompt) + 10


def test_scheduler_tenants_alternate_and_each_keeps_its_order() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    first = [simulation.add([1, 2], 2, tenant="a") for _ in range(4)]
    second = [simulation.add([1, 2], 2, tenant="b") for _ in range(4)]
    pairs = [number for pair in zip(first, second, strict=True) for number in pair]
    assert order_of(simulation) == pairs


def test_scheduler_tenant_with_long_answers_gets_fewer_turns() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    long = [simulation.add([1, 2], 22, tenant="a") for _ in range(3)]
    short = [simulation.add([1, 2], 2, tenant="b") for _ in range(8)]
    order = order_of(simulation)
    assert order[:7] == [long[0], *short[:6]]


def test_scheduler_priority_comes_before_the_turns_of_tenants() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    urgent = [simulation.add([1, 2], 2, tenant="a", priority=-1) for _ in range(3)]
    other = simulation.add([1, 2], 2, tenant="b")
    assert order_of(simulation) == [*urgent, other]


def test_scheduler_one_tenant_keeps_the_order_of_arrival_also_when_served_unequally() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    ids = [
        simulation.add([1] * (1 + number % 3), 1 + number % 4, tenant="a") for number in range(9)
    ]
    turns = simulation.scheduler.waiting.turns
    assert not turns.is_stale
    assert order_of(simulation) == ids
    assert not turns.is_stale, "one tenant needs no counting"


def test_scheduler_tenant_that_was_away_uses_nothing_that_it_missed() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    gone = simulation.add([1, 2], 2, tenant="b")
    for _ in range(6):
        simulation.add([1, 2], 2, tenant="a")
    for _ in range(8):
        simulation.turn()
    back = [simulation.add([1, 2], 2, tenant="b") for _ in range(3)]
    order = order_of(simulation)
    assert order[0] == gone
    rest = order[order.index(back[0]) :]
    assert [number in back for number in rest[:4]] == [True, False, True, False]


def test_scheduler_tenant_that_aborted_its_queue_is_not_served_later_for_it() -> None:
    simulation = Simulation(**LIMITS | {"max_num_seqs": 1})
    aborted = [simulation.add([1] * 20, 2, tenant="a") for _ in range(20)]
    others = [simulation.add([1, 2], 2, tenant="b") for _ in range(6)]
    simulation.abort(*filter(None, aborted))
    again = simulation.add([1, 2], 2, tenant="a")
    order = order_of(simulation)
    assert order.index(again) <= 1
    assert set(order) == {*others, again}


def test_embed_queue_texts_of_two_tenants_take_turns() -> None:
    queue = EmbedQueue()
    for number in range(1, 9):
        queue.add(EmbedRequest(number, [1, 2, 3], 0.0, tenant="a"))
    queue.add(EmbedRequest(9, [1, 2, 3], 0.0, tenant="b"))
    assert {text.id for text in queue.take(6)} == {1, 9}


def test_turns_forget_all_tenants_once_one_is_left() -> None:
    turns = TenantTurns()
    turns.join("a")
    for number in range(2, 100):
        turns.join(f"tenant {number}")
        turns.count(f"tenant {number}", 10)
        turns.leave(f"tenant {number}", 5)
    turns.check(["a"])
    assert len(turns._served) == 1
