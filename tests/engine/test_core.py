"""EngineCore: what it says for what it is told; order, counters, refusals and the end."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.layers.linear import PackedWeight
from engine.protocol import Rejected, Shutdown, StepOutputs
from tests.engine.driver import MODES, Driver, each

modes = pytest.mark.parametrize("mode", each(MODES))


@modes
def test_every_request_ends_once_and_idles_to_nothing(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode)
    ids = [driver.submit([5] * (1 + n), 1 + n % 4) for n in range(40)]
    driver.run()
    assert [driver.finish(i) for i in ids] == ["length"] * 40
    assert [len(driver.tokens(i)) for i in ids] == [1 + n % 4 for n in range(40)]
    sent = len(driver.sent)
    driver.turn(3)
    assert len(driver.sent) == sent, "an idle engine is silent"


@modes
def test_stop_tokens_end_a_request_but_not_before_min_tokens(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode)
    free = driver.submit([1, 2, 3], 12)
    driver.run()
    answer = driver.tokens(free)
    stop = answer[4]
    first = answer.index(stop)
    stopped = driver.submit([1, 2, 3], 12, stop_token_ids=(stop,))
    later = driver.submit([1, 2, 3], 12, stop_token_ids=(stop,), min_tokens=8)
    exact = driver.submit([1, 2, 3], 5, stop_token_ids=(stop,))
    driver.run()
    assert (driver.tokens(stopped), driver.finish(stopped)) == (answer[: first + 1], "stop")
    assert stop not in driver.tokens(later)[:8]
    assert len(driver.tokens(later)) >= 8
    assert driver.finish(exact) == "stop"


@modes
def test_priority_then_arrival(checkpoint: Path, mode: dict[str, Any]) -> None:
    driver = Driver(checkpoint, **mode, max_num_seqs=1)
    ids = [driver.submit([1], 2, priority=priority) for priority in (0, 9, 0, -5)]
    driver.run()
    assert list(driver.admissions) == [ids[3], ids[0], ids[2], ids[1]]
    assert list(driver.outputs) == list(driver.admissions)


@modes
def test_tenants_never_share_blocks(checkpoint: Path, mode: dict[str, Any]) -> None:
    driver = Driver(checkpoint, **mode, block_size=16)
    prompt = list(range(40))
    for salt, cached in (("", 0), ("a", 0), ("b", 0), ("a", 32), ("", 32)):
        request_id = driver.submit(prompt, 4, salt=salt)
        driver.run()
        assert driver.cached_tokens(request_id) == cached
    together = [driver.submit(prompt, 30, salt=salt) for salt in "cdcd"]
    driver.turn(5)
    tables = {s.id: set(s.tables[0]) for s in driver.core.scheduler.running}
    assert len(tables) == 4
    assert not (tables[together[0]] | tables[together[2]]) & (
        tables[together[1]] | tables[together[3]]
    )
    assert len(tables[together[0]] & tables[together[2]]) == 2


@modes
def test_what_cannot_run_is_rejected_and_the_rest_goes_on(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode)
    fine = driver.submit([1, 2], 5)
    too_long = driver.submit([1] * 250, 10)
    empty = driver.submit([], 5)
    second = driver.submit([3], 5)
    driver.run()
    codes = {i: rejected.code for i, rejected in driver.rejected.items()}
    assert codes == {too_long: "context_length_exceeded", empty: "invalid_value"}
    assert "256" in driver.rejected[too_long].message
    assert [driver.finish(i) for i in (fine, second)] == ["length"] * 2
    assert not driver.rejected.keys() & driver.outputs.keys()


def test_one_request_larger_than_the_whole_cache(checkpoint: Path) -> None:
    """Reliability T-17: refused at admission, the others untouched."""
    driver = Driver(checkpoint, block_size=16, num_gpu_blocks_override=4)
    assert driver.core.facts.max_model_len == 64, "what fits is what is served"
    small = driver.submit([1, 2], 5)
    large = driver.submit([1] * 60, 6)
    driver.run()
    assert driver.rejected[large].code == "context_length_exceeded"
    assert driver.finish(small) == "length"


def test_every_step_looks_for_the_cores_and_its_stats_tell(checkpoint: Path) -> None:
    driver, looks = Driver(checkpoint), list[float]()
    policy = SimpleNamespace(look=looks.append, contention=0.25, contended=True)
    driver.core.runner.wait_policy = policy  # type: ignore[assignment]
    driver.submit([1, 2], 4)
    driver.run()
    assert len(looks) == driver.stats.step == 4
    assert (driver.stats.cpu_contention, driver.stats.cpu_contended) == (0.25, True)


@modes
def test_as_many_steps_are_in_flight_as_depth_says(checkpoint: Path, mode: dict[str, Any]) -> None:
    """With fewer a GPU would wait for the host, with more each token would come a step late."""
    driver = Driver(checkpoint, **mode)
    driver.submit([1, 2], 8)
    driver.turn(4)
    assert len(driver.core.in_flight) == driver.core.depth
    assert len(driver.outputs[1]) == 4 - driver.core.depth


@modes
def test_nothing_is_in_flight_when_the_engine_rests(checkpoint: Path, mode: dict[str, Any]) -> None:
    """An end token is seen while the step after it is under way."""
    driver = Driver(checkpoint, **mode)
    plain = driver.submit([1, 2, 3], 8)
    driver.run()
    stopped = driver.submit([1, 2, 3], 8, stop_token_ids=(driver.tokens(plain)[3],))
    driver.run()
    assert driver.finish(stopped) == "stop"


@modes
def test_the_context_is_used_to_its_last_token(checkpoint: Path, mode: dict[str, Any]) -> None:
    """Each row is full; none may write into the next, whose tokens the penalty looks at."""
    requests = [([7] * 2, 30), (list(range(31)), 1), ([8] * 16, 16)]
    answers = []
    for longest in (32, 64):
        driver = Driver(checkpoint, **mode, block_size=16, max_model_len=longest)
        ids = [driver.submit(p, most, repetition_penalty=3.0) for p, most in requests]
        driver.run()
        answers.append([driver.tokens(i) for i in ids])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [30, 1, 16]


@modes
def test_the_counters_count(checkpoint: Path, mode: dict[str, Any]) -> None:
    driver = Driver(checkpoint, **mode, block_size=16, max_num_batched_tokens=32)
    lengths, answer = [10, 40, 40], 6
    for length in lengths:
        driver.submit(list(range(length)), answer)
    driver.run()
    steps = [m.stats for m in driver.sent if isinstance(m, StepOutputs) and m.stats.step]
    computed = sum(lengths) + len(lengths) * (answer - 1) - steps[-1].prefix_hits
    assert sum(s.step_prefill_tokens + s.step_decode_tokens for s in steps) == computed
    assert all(s.step_prefill_tokens + s.step_decode_tokens <= 32 for s in steps)
    assert steps[-1].prefix_queries == sum(lengths)
    assert steps[-1].prefix_hits == 32  # the third finds two blocks of the second
    for earlier, later in pairwise(steps):
        for counter in ("step", "preemptions", "prefix_queries", "prefix_hits"):
            assert getattr(earlier, counter) <= getattr(later, counter)
    assert all(
        0 <= s.blocks_held + s.blocks_cached <= s.blocks_total and s.step_seconds >= 0
        for s in steps
    )
    assert max(s.running for s in steps) == 3


@modes
def test_no_admission_is_earlier_than_its_request(checkpoint: Path, mode: dict[str, Any]) -> None:
    """Queue time = admission - arrival is never negative, whatever ran when the request came."""
    driver = Driver(checkpoint, **mode)
    driver.submit([1, 2, 3], 20)
    driver.turn(3)
    arrivals = {}
    for number in range(5):
        arrival = time.monotonic()
        arrivals[driver.submit([4 + number], 4, arrival=arrival)] = arrival
        driver.turn()
    driver.run()
    for request_id, arrival in arrivals.items():
        assert driver.admissions[request_id].at >= arrival


def test_shutdown_ends_the_loop_with_work_left(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.submit([1, 2], 200)
    driver.turn(3)
    driver.inbox.append(Shutdown())
    driver.core.run()
    assert not driver.core.running


def test_an_idle_core_blocks_on_its_inbox_and_a_busy_one_does_not(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    asked: list[bool] = []

    class Endpoint:
        def drain(self, *, block: bool) -> list[Any]:
            asked.append(block)
            return driver.drain(block=block)

        def send(self, message: Any) -> None:
            driver.send(message)

    core = EngineCore(driver.config, driver.runner, Endpoint(), depth=1)
    driver.submit([1], 3)
    while core.scheduler.has_work or core.in_flight or not asked:
        core.turn()
    core.turn()
    assert asked[-1]
    assert not any(asked[:-1])


def test_a_request_that_has_come_does_not_wait_for_a_recording(checkpoint: Path) -> None:
    driver = Driver(checkpoint, captured=True, max_num_seqs=20)
    assert driver.runner.graphs
    sizes = list(driver.runner.graphs.sizes)
    driver.submit([1], 3)
    driver.run()
    assert driver.runner.graphs.sizes == sizes
    driver.turn()
    assert len(driver.runner.graphs.sizes) == len(sizes) + 1


def test_an_abort_of_the_last_request_reports_the_empty_engine(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    request_id = driver.submit([1, 2, 3], 50)
    driver.turn(3)
    driver.abort(request_id)
    driver.turn()
    last = driver.sent[-1]
    assert isinstance(last, StepOutputs)
    assert (last.tokens, last.stats.running, last.stats.blocks_held) == ([], 0, 0)


def test_a_refusal_goes_out_in_the_turn_it_came(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.submit([], 5)
    driver.turn()
    assert isinstance(driver.sent[0], Rejected)


def test_onednn_meets_few_numbers_of_rows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps half a megabyte for each of a linear's, so a server would grow for hours."""
    met: set[int] = set()
    multiply = PackedWeight.__call__

    def seen(self: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        met.add(len(x))
        return multiply(self, x)

    driver = Driver(checkpoint, enable_prefix_caching=False)
    monkeypatch.setattr(PackedWeight, "__call__", seen)
    answers = {}
    for length in range(1, 120):
        answers[length] = driver.submit(list(range(length)), 5)
        driver.turn()
    driver.run()
    assert met >= {40, 120}
    assert not [rows for rows in met if rows > 32 and rows % 8]
    monkeypatch.setattr(driver.runner, "_rounded", lambda rows, step: rows)
    for length, before in answers.items():
        again = driver.submit(list(range(length)), 5)
        driver.run()
        assert driver.tokens(again) == driver.tokens(before)
    assert 119 in met, "it was not what fills up"
