"""Admission control by waiting time, with a simulated engine: goodput survives saturation."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.client.admission import (
    ALWAYS_QUEUED,
    MAX_PIXEL_BYTES,
    AdmissionControl,
    ServiceRate,
)
from engine.config import EngineConfig
from engine.errors import EngineOverloadedError, RequestRejectedError
from engine.protocol.outputs import EngineStats

ROWS, STEP_S, SECONDS = 16, 0.02, 400.0
OBJECTIVE_S = 1.0  # a request that waits longer is of no use
BOUND_S = 0.5
NO_LIMIT = 1e6


@dataclass
class Outcome:
    good: int = 0
    late: int = 0
    refused: int = 0


@dataclass
class Clock:
    value: float = 0.0

    def __call__(self) -> float:
        return self.value


@pytest.fixture
def clock() -> Clock:
    return Clock()


def simulate(
    clock: Clock,
    load: float,
    bound: float | None,
    service: Callable[[random.Random], float],
    step_s: float = STEP_S,
) -> Outcome:
    """Simulate `load` times the capacity of ROWS rows.

    Each request takes `service` seconds, on average 1.
    """
    rng = random.Random(7)
    queue = AdmissionControl(EngineConfig(max_queue_wait=bound, max_num_queued_reqs=10_000), clock)
    outcome, waiting, running = Outcome(), deque[tuple[int, float]](), list[float]()
    arrival, number = rng.expovariate(load * ROWS), 0
    for step in range(int(SECONDS / step_s)):
        end = step * step_s
        while arrival <= end:
            clock.value, number = arrival, number + 1
            try:
                queue.check(1, 10, EngineStats())
            except EngineOverloadedError:
                outcome.refused += 1
            else:
                queue.join(number, 1, 10)
                waiting.append((number, arrival))
            arrival += rng.expovariate(load * ROWS)
        clock.value, admitted = end, []
        while running and running[0] <= end:
            heapq.heappop(running)
        while waiting and len(running) < ROWS:
            request, came = waiting.popleft()
            admitted.append(request)
            heapq.heappush(running, end + service(rng))
            outcome.good += end - came <= OBJECTIVE_S
            outcome.late += end - came > OBJECTIVE_S
        queue.admitted(admitted, end)
    return outcome


SERVICES: dict[str, Callable[[random.Random], float]] = {
    "alike": lambda rng: 1.0,  # rows finish together: many admissions at once, then none
    "lognormal": lambda rng: rng.lognormvariate(-0.32, 0.8),
    "exponential": lambda rng: rng.expovariate(1.0),
}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_queue_past_saturation_with_wait_limit_keeps_goodput(
    clock: Clock, service: Callable[[random.Random], float]
) -> None:
    loads = (0.8, 1.0, 1.2, 1.5, 3.0)
    good = {load: simulate(clock, load, BOUND_S, service).good for load in loads}
    peak = max(good.values())
    assert peak > 0.9 * ROWS * SECONDS
    assert all(good[load] >= 0.95 * peak for load in loads if load > 1)


def test_queue_past_saturation_without_wait_limit_loses_goodput(clock: Clock) -> None:
    """Shows that the wait limit causes the result of the test above."""
    outcome = simulate(clock, 1.2, NO_LIMIT, SERVICES["lognormal"])
    assert outcome.refused == 0
    assert outcome.good < 0.3 * ROWS * SECONDS


def test_queue_with_default_limit_keeps_goodput_at_twice_the_saturation(clock: Clock) -> None:
    for service in SERVICES.values():
        saturated = simulate(clock, 1.0, None, service)
        overloaded = simulate(clock, 2.0, None, service)
        assert overloaded.good >= 0.95 * saturated.good
        assert overloaded.late <= 0.05 * overloaded.good


def test_queue_with_default_limit_lets_a_few_wait_for_a_slow_model(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(), clock)
    for number in range(ALWAYS_QUEUED):
        clock.value += 60.0
        queue.check(1, 10, EngineStats())
        queue.join(number, 1, 10)
    with pytest.raises(EngineOverloadedError, match=r"0\.5 s"):
        queue.check(1, 10, EngineStats())


def test_queue_with_default_limit_takes_a_crowd_that_arrives_at_once(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(), clock)
    for number in range(500):
        queue.check(1, 10, EngineStats())
        queue.join(number, 1, 10)


def test_queue_below_saturation_refuses_almost_none(clock: Clock) -> None:
    for service in SERVICES.values():
        outcome = simulate(clock, 0.6, BOUND_S, service)
        assert outcome.refused <= 0.005 * (outcome.good + outcome.refused)


def test_queue_with_long_steps_refuses_almost_none(clock: Clock) -> None:
    """Requests that arrive within a step are admitted together at its end: that is no queue."""
    outcome = simulate(clock, 0.5, BOUND_S, SERVICES["lognormal"], step_s=0.4)
    assert outcome.refused <= 0.005 * (outcome.good + outcome.refused)


def test_queue_admitted_requests_rarely_exceed_the_objective(clock: Clock) -> None:
    for service in SERVICES.values():
        outcome = simulate(clock, 1.5, BOUND_S, service)
        assert outcome.late <= 0.05 * (outcome.good + outcome.late)


def test_check_refusal_names_wait_limit_and_flag(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(max_queue_wait=2.0), clock)
    for number in range(3):
        queue.join(number, 1, 10)
    clock.value = 1.9
    queue.check(1, 10, EngineStats())
    clock.value = 4.0
    words = r"wait for about 4\.0 s.*2 s \(--max-queue-wait\)"
    with pytest.raises(EngineOverloadedError, match=words) as refusal:
        queue.check(1, 10, EngineStats())
    assert refusal.value.retry_after in (4, 5)
    queue.forget([0, 1, 2])
    queue.check(1, 10, EngineStats())


def test_pace_counts_only_intervals_limited_by_the_engine() -> None:
    pace = ServiceRate()
    for moment in range(0, 1000, 10):  # one request per ten seconds, admitted a second later
        pace.joined(float(moment))
        pace.admitted(1, moment + 1.0, left=False)
    pace.joined(2000.0)
    assert pace.wait(4, 2000.0) == 0.0
    assert pace.wait(4, 2010.0) == 10.0  # the first request has waited that long
    for moment in range(2001, 2201):  # one per second, and the queue never empties
        pace.admitted(1, float(moment), left=True)
    assert pace.wait(4, 2200.0) == pytest.approx(5.0, rel=0.01)
    for moment in range(2201, 2500):  # each time the queue is emptied within a tenth of a second
        pace.admitted(1, moment + 0.0, left=False)
        pace.joined(moment + 0.9)
    assert pace.wait(4, 2500.0) == pytest.approx(0.5, rel=0.1)


def test_expecting_reserves_a_place_for_a_request_in_preparation(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(max_num_queued_reqs=2, max_num_queued_tokens=10), clock)
    stats = EngineStats()
    with queue.reserve(stats):
        queue.check(1, 99, stats)  # no request waits, so tokens are not limited
        with queue.reserve(stats):
            for attempt in (lambda: queue.check(1, 0, stats), queue.reserve(stats).__enter__):
                with pytest.raises(EngineOverloadedError, match="2 requests"):
                    attempt()
        queue.check(1, 0, stats)
        queue.join(1, 1, 5)
        with pytest.raises(EngineOverloadedError):
            queue.check(1, 0, stats)
    queue.check(1, 0, stats)
    with pytest.raises(KeyError), queue.reserve(stats):
        raise KeyError
    queue.check(1, 0, stats)
    queue.forget([1])
    queue.check(99, 99, stats)  # an empty queue takes any request


def test_check_empty_queue_refuses_too_many_tokens_in_one_request(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(max_num_queued_tokens=10), clock)
    queue.check(64, 160, EngineStats())
    with pytest.raises(RequestRejectedError, match=r"161 tokens in all, .* limit is 160"):
        queue.check(64, 161, EngineStats())
    queue.check(1, 10**6, EngineStats())  # one prompt is limited by the model


def waiting(queue: AdmissionControl, tenant: str, tokens: int = 1) -> int:
    """Queue requests of a tenant until it may queue no more; return how many."""
    for count in itertools.count():
        try:
            queue.check(1, tokens, EngineStats(), tenant)
        except EngineOverloadedError:
            return count
        queue.join(next(IDS), 1, tokens, tenant)
    raise AssertionError


IDS = itertools.count(1)


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_queue_one_tenant_leaves_room_for_others(limit: str) -> None:
    queue = AdmissionControl(EngineConfig(**{limit: 12}))
    assert [waiting(queue, tenant) for tenant in "abc"] == [6, 3, 2]
    with pytest.raises(EngineOverloadedError, match="6 of them with 6 tokens have your API key"):
        queue.check(1, 1, EngineStats(), "a")
    assert waiting(queue, "") == 1  # without keys there are no shares


def test_queue_oversized_request_of_one_tenant_locks_no_other_out() -> None:
    queue = AdmissionControl(EngineConfig(max_num_queued_reqs=8))
    queue.check(128, 128, EngineStats(), "a")  # an empty queue takes it
    for number in range(128):
        queue.join(-number, 1, 1, "a")
    assert waiting(queue, "a") == 0
    assert waiting(queue, "b") == 2
    queue.forget([-number for number in range(128)])
    assert queue.requests == 2


def test_queue_reservations_count_as_the_share_of_their_tenant() -> None:
    queue = AdmissionControl(EngineConfig(max_num_queued_reqs=4))
    with queue.reserve(EngineStats(), "a"), queue.reserve(EngineStats(), "a"):
        with pytest.raises(EngineOverloadedError):
            queue.check(1, 0, EngineStats(), "a")
        queue.check(1, 0, EngineStats(), "b")
    queue.check(1, 0, EngineStats(), "a")


def test_queue_expected_wait_counts_no_requests_behind_the_turn_of_the_tenant(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(max_queue_wait=5.0, max_num_queued_reqs=1000), clock)
    for number in range(1, 101):
        queue.join(-number, 1, 1, "a")
    for number in range(1, 11):
        clock.value += 1.0
        queue.admitted([-number], clock.value)
    with pytest.raises(EngineOverloadedError, match="--max-queue-wait"):
        queue.check(1, 1, EngineStats(), "a")
    queue.check(1, 1, EngineStats(), "b")


def test_queue_bounds_the_pixels_of_waiting_images(clock: Clock) -> None:
    queue = AdmissionControl(EngineConfig(max_queue_wait=600), clock)
    half = MAX_PIXEL_BYTES // 2
    queue.check(1, 9, EngineStats(), pixels=3 * half)  # an empty queue takes one prompt
    for number in (1, 2):
        queue.check(1, 9, EngineStats(), pixels=half)
        queue.join(number, 1, 9, pixels=half)
    with pytest.raises(EngineOverloadedError, match=r"have 1024 MiB of pixels; the limit is 1024"):
        queue.check(1, 9, EngineStats(), pixels=1)
    queue.check(1, 9, EngineStats())  # texts go on
    queue.admitted([1], 1.0)
    queue.check(1, 9, EngineStats(), pixels=half)
    with pytest.raises(RequestRejectedError, match=r"1536 MiB in all, each counted n times"):
        queue.check(3, 27, EngineStats(), pixels=3 * half)
