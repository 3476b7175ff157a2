"""The order of texts: short ones pass long ones that came a little earlier, and no text starves."""

from __future__ import annotations

from engine.protocol.embed import EmbedRequest
from engine.scheduling import embed_queue
from engine.scheduling.embed_queue import FREE, GROWTH, PATIENCE_S, EmbedQueue

LONG, SHORT, BUDGET = 250, 10, 512


def queue_of(*texts: tuple[int, float]) -> EmbedQueue:
    """Return a queue of texts of given sizes and times of arrival, with the ids 1, 2, ..."""
    queue = EmbedQueue()
    for number, (size, arrival) in enumerate(texts, 1):
        queue.add(EmbedRequest(number, [7] * size, arrival))
    return queue


def steps(queue: EmbedQueue, budget: int = BUDGET) -> list[set[int]]:
    found = []
    while taken := queue.take(budget):
        found.append({text.id for text in taken})
    return found


def test_short_text_passes_long_ones_and_is_computed_without_them() -> None:
    queue = queue_of(*[(LONG, 0.0)] * 8, (SHORT, 0.1))
    assert steps(queue)[0] == {9}


def test_text_of_a_later_arrival_than_patience_allows_waits() -> None:
    queue = queue_of((LONG, 0.0), (SHORT, PATIENCE_S * (LONG - SHORT) + 0.001))
    first = queue.take(LONG)
    assert [text.id for text in first] == [1]


def test_long_text_is_computed_while_short_ones_keep_coming() -> None:
    queue, number = queue_of((LONG, 0.0)), 1
    for turn in range(100):
        for _ in range(3):
            number += 1
            queue.add(EmbedRequest(number, [7] * SHORT, 0.01 * turn))
        if 1 in {text.id for text in queue.take(3 * SHORT)}:
            break
    assert turn <= 100 * PATIENCE_S * LONG + 1


def test_priority_comes_before_length() -> None:
    queue = EmbedQueue()
    queue.add(EmbedRequest(1, [7] * SHORT, 0.0, priority=1))
    queue.add(EmbedRequest(2, [7] * LONG, 0.0, priority=0))
    assert queue.take(LONG)[0].id == 2


def test_texts_of_one_request_fill_steps_from_the_shortest_on() -> None:
    sizes = [(5 + 7 * number % 120, 0.0) for number in range(64)]
    taken = []
    queue = queue_of(*sizes)
    while step := queue.take(BUDGET):
        assert sum(len(text.tokens) for text in step) <= BUDGET
        taken.append([len(text.tokens) for text in step])
    assert [size for step in taken for size in step] == sorted(size for size, _ in sizes)
    # Growing lengths cost no additional step.
    assert len(taken) <= sum(size for size, _ in sizes) // (BUDGET - 125) + 1


def test_step_has_one_long_text_at_most_while_several_requests_wait() -> None:
    long = int(embed_queue.LONG * BUDGET) + 1
    queue = queue_of(*[(long, 0.0)] * 8)
    assert len(queue.take(BUDGET)) == 3, "all are of one request"
    queue.add(EmbedRequest(9, [7] * long, 0.1))
    assert len(queue.take(BUDGET)) == 1
    queue.abort({9})
    assert len(queue.take(BUDGET)) == 3
    short = queue_of(*[(long - 1, 0.01 * number) for number in range(8)])
    assert len(short.take(BUDGET)) == 4
    mixed = queue_of((long, 0.0), (long, 0.1), (SHORT, 0.6))
    assert steps(mixed) == [{1, 3}, {2}]


def test_step_grows_by_a_bounded_factor() -> None:
    queue = queue_of((SHORT, 0.0), (FREE, 0.0), (GROWTH * (FREE + SHORT) + 1, 0.0))
    assert steps(queue) == [{1, 2}, {3}]
    assert steps(queue_of((FREE, 0.0), (GROWTH * FREE, 0.0))) == [{1, 2}]
    assert steps(queue_of((FREE, 0.0), (GROWTH * FREE + 1, 0.0))) == [{1}, {2}]


def test_text_above_the_budget_is_computed_alone() -> None:
    assert steps(queue_of((2 * BUDGET, 0.0), (2 * BUDGET, 0.0))) == [{1}, {2}]
