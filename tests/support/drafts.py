"""Drafts of a test's choice in place of those by n-grams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from engine.scheduling.sequence import Sequence as Record
from engine.scheduling.speculation import Speculation
from tests.support.driver import Driver


def run_with_aborts(
    driver: Driver, submit: Callable[..., int], numbers: Iterable[int], ids: dict[int, int]
) -> list[int]:
    """Submit requests `numbers`, each before those that run, and abort every fourth.

    Note their numbers in `ids`; return the ids of those that ended.
    """
    for number in numbers:
        ids[submit(driver, number, priority=-len(ids))] = number
        driver.turn()
        if len(ids) % 4 == 0:
            driver.abort(max(ids) - 1)
    driver.run()
    assert driver.stats.preemptions
    return [request_id for request_id in ids if driver.finish(request_id)]


def draft_from(driver: Driver, known: Callable[[int], list[int]], share: float) -> None:
    """Draft the tokens of known answers. A `share` of them are replaced by wrong ones."""

    def draft(sequence: Record, most: int) -> Sequence[int]:
        rest = known(sequence.id)[sequence.num_outputs :][:most]
        rng = random.Random(sequence.id * 1000 + len(rest))
        return [(token + 1) % 600 if rng.random() < share else token for token in rest]

    scheduler = driver.core.scheduler
    speculation = Speculation(scheduler.tables, draft, driver.runner.matchers)
    scheduler.speculation = speculation
