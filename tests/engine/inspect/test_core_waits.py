"""The engine reports its waits for a core, and only while they are measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device.openmp_wait import Times
from engine.inspect.core_waits import CoreWaits, thread_name
from engine.protocol.outputs import StepOutputs
from engine.protocol.watch import MeasureWaits, StepWaits
from tests.support.driver import EAGER, Driver, each

NS = 1_000_000_000
MAIN = str(os.getpid())


def scripted(*readings: Times, waited_ns: int = -1) -> CoreWaits:
    names = {"io": "ZMQbg/IO/0"}
    left = iter(readings)
    return CoreWaits(waited_ns, lambda: next(left), lambda thread: names.get(thread, "python"))


def test_waits_are_those_of_threads_that_compute() -> None:
    waits = scripted(
        {MAIN: (5 * NS, NS), "io": (0, 0)},
        {MAIN: (6 * NS, 3 * NS), "worker": (NS, NS), "io": (0, 9 * NS)},
        {MAIN: (6 * NS, 3 * NS), "worker": (NS, 2 * NS), "io": (0, 9 * NS)},
    )
    assert waits.of_step(7) == StepWaits(7, 0.0, 2.0, 3.0)
    assert waits.of_step(8) == StepWaits(8, 0.0, 1.0, 1.0)


def test_wait_before_the_arrival_of_a_request_is_not_that_of_its_step() -> None:
    waits = scripted(
        {MAIN: (0, 5 * NS)}, {MAIN: (0, 6 * NS)}, {MAIN: (0, 8 * NS)}, {MAIN: (0, 9 * NS)},
        waited_ns=3 * NS,
    )  # fmt: skip
    waits.arrived()
    assert waits.of_step(1) == StepWaits(1, 2.0 + 1.0, 2.0, 2.0)
    assert waits.of_step(2) == StepWaits(2, 0.0, 1.0, 1.0)


def test_system_without_counts_has_no_waits() -> None:
    assert scripted({}, {}, waited_ns=5).of_step(1) == StepWaits(1, 0.0, 0.0, 0.0)


def test_name_of_an_ended_thread_is_empty() -> None:
    assert thread_name("0") == ""
    assert thread_name(MAIN)


@pytest.mark.parametrize("mode", each(EAGER))
def test_waits_are_sent_behind_each_step_while_they_are_measured(
    checkpoint: Path, mode: dict[str, object]
) -> None:
    driver = Driver(checkpoint, **mode)

    def run() -> tuple[int, int]:
        """Run a request; return how many steps it took, and how many of them came with waits."""
        driver.sent.clear()
        driver.submit([1, 2, 3], 4)
        driver.run()
        steps = waits = 0
        last = None
        for message in driver.sent:
            if isinstance(message, StepOutputs) and message.stats.step_seconds:
                steps += 1
            if isinstance(message, StepWaits):
                assert isinstance(last, StepOutputs)
                assert message.step == last.stats.step
                assert 0 <= message.longest <= message.total
                waits += 1
            last = message
        return steps, waits

    assert run()[1] == 0
    driver.inbox.append(MeasureWaits(on=True))
    steps, waits = run()
    assert steps == waits > 0
    driver.inbox.append(MeasureWaits(on=False))
    assert run()[1] == 0
    assert driver.inspectors.waits is None
