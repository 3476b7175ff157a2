"""EngineCore: outputs, order, counters, rejections and shutdown."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import core
from engine.assembly import make_core
from engine.layers.weights.onednn import PackedWeight
from engine.protocol.adapters import UnloadAdapter
from engine.protocol.generate import Abort, CacheLookup
from engine.protocol.outputs import Rejected, StepOutputs
from engine.protocol.ready import Shutdown
from engine.protocol.watch import Watch
from tests.support.driver import MODES, Driver, each

modes = pytest.mark.parametrize("mode", each(MODES))


@modes
def test_core_each_request_ends_once_and_idle_core_is_silent(
    checkpoint: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "SIGN_S", 3600.0)  # captures are work, and slow on a busy machine
    driver = Driver(checkpoint, **mode)
    ids = [driver.submit([5] * (1 + n), 1 + n % 4) for n in range(40)]
    driver.run()
    assert [driver.finish(i) for i in ids] == ["length"] * 40
    assert [len(driver.tokens(i)) for i in ids] == [1 + n % 4 for n in range(40)]
    sent = len(driver.sent)
    driver.turn(3)
    assert len(driver.sent) == sent, "an idle engine sent a message"


@modes
def test_core_stop_token_ends_request_only_after_min_tokens(
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
def test_core_admits_by_priority_then_arrival(checkpoint: Path, mode: dict[str, Any]) -> None:
    driver = Driver(checkpoint, **mode, max_num_seqs=1)
    ids = [driver.submit([1], 2, priority=priority) for priority in (0, 9, 0, -5)]
    driver.run()
    assert list(driver.admissions) == [ids[3], ids[0], ids[2], ids[1]]
    assert list(driver.outputs) == list(driver.admissions)


@pytest.mark.parametrize("is_caching", [True, False])
def test_core_answers_a_cache_lookup_as_the_next_request_will_find(
    checkpoint: Path, is_caching: bool
) -> None:
    driver = Driver(checkpoint, block_size=16, enable_prefix_caching=is_caching)
    prompt = list(range(40))

    def num_cached(length: int, salt: str) -> int:
        driver.core.handle(CacheLookup(0, prompt[:length], salt))
        answer = driver.sent[-1]
        assert isinstance(answer, StepOutputs)
        return answer.lookups[0]

    assert num_cached(40, "a") == 0
    first = driver.submit(prompt, 4, salt="a")
    driver.run()
    stats = driver.core.stats()
    for length, salt, found in (
        (40, "a", 32),
        (33, "a", 32),
        (32, "a", 16),
        (0, "a", 0),
        (40, "b", 0),
    ):
        assert num_cached(length, salt) == (found if is_caching else 0)
    assert driver.core.stats() == stats, "a lookup changes nothing"
    second = driver.submit(prompt, 4, salt="a")
    driver.run()
    assert driver.cached_tokens(second) == (32 if is_caching else 0)
    assert driver.tokens(first) == driver.tokens(second)


@modes
def test_prefix_cache_different_salts_never_share_blocks(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
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
def test_core_invalid_requests_are_rejected_and_others_finish(
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


def test_core_request_larger_than_kv_cache_is_rejected_alone(checkpoint: Path) -> None:
    """It is rejected at admission control; other requests run to the end."""
    driver = Driver(checkpoint, block_size=16, num_gpu_blocks_override=4)
    assert driver.core.facts.max_model_len == 64, "max_model_len must fit the KV cache"
    small = driver.submit([1, 2], 5)
    large = driver.submit([1] * 60, 6)
    driver.run()
    assert driver.rejected[large].code == "context_length_exceeded"
    assert driver.finish(small) == "length"


def test_core_polls_wait_policy_every_step_and_reports_its_gauges(checkpoint: Path) -> None:
    driver, polls = Driver(checkpoint), list[float]()
    gauges = {"engine_cpu_contention": 0.25, "engine_cpu_contended": 1.0}
    driver.runner._poll = polls.append
    policy = SimpleNamespace(gauges=lambda: gauges)
    driver.runner.gauges._openmp_wait = policy  # type: ignore[attr-defined]
    driver.submit([1, 2], 4)
    driver.run()
    assert len(polls) == driver.stats.step == 4
    assert driver.stats.gauges.pop("engine_resident_memory_bytes") > 0
    assert driver.stats.gauges == gauges


@modes
def test_core_keeps_depth_steps_in_flight(checkpoint: Path, mode: dict[str, Any]) -> None:
    """With fewer, a GPU would wait for the host. With more, each token would come a step late."""
    driver = Driver(checkpoint, **mode)
    driver.submit([1, 2], 8)
    driver.turn(4)
    assert len(driver.core.in_flight) == driver.core.depth
    assert len(driver.outputs[1]) == 4 - driver.core.depth


@modes
def test_core_stop_token_leaves_no_step_in_flight(checkpoint: Path, mode: dict[str, Any]) -> None:
    """The core sees a stop token while the next step is already in flight."""
    driver = Driver(checkpoint, **mode)
    plain = driver.submit([1, 2, 3], 8)
    driver.run()
    stopped = driver.submit([1, 2, 3], 8, stop_token_ids=(driver.tokens(plain)[3],))
    driver.run()
    assert driver.finish(stopped) == "stop"


@modes
def test_core_full_context_does_not_write_into_next_row(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    """All rows are full. The repetition penalty reads a row's tokens, so it shows a stray write."""
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
def test_stats_counters_match_computed_tokens(checkpoint: Path, mode: dict[str, Any]) -> None:
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
    assert steps[-1].prefix_hits == 32  # the third request reuses two blocks of the second
    for earlier, later in pairwise(steps):
        for counter in ("step", "preemptions", "prefix_queries", "prefix_hits"):
            assert getattr(earlier, counter) <= getattr(later, counter)
    assert all(
        0 <= s.blocks_held + s.blocks_cached <= s.blocks_total and s.step_seconds >= 0
        for s in steps
    )
    assert max(s.running for s in steps) == 3


@modes
def test_admission_time_is_not_before_arrival(checkpoint: Path, mode: dict[str, Any]) -> None:
    """Queue time = admission - arrival is never negative, even if steps run at arrival."""
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


def test_core_shutdown_ends_loop_with_work_left(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.submit([1, 2], 200)
    driver.turn(3)
    driver.inbox.append(Shutdown())
    driver.core.run()
    assert not driver.core.running


def test_core_drain_blocks_only_when_idle(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    asked: list[tuple[bool, bool]] = []

    class Endpoint:
        def drain(self, *, block: bool) -> list[Any]:
            asked.append((block, bool(core.scheduler.has_work or core.in_flight)))
            return driver.drain(block=block)

        def send(self, message: Any) -> None:
            driver.send(message)

    core = make_core(driver.config, driver.loaded, Endpoint(), depth=1)
    driver.submit([1], 3)
    while core.scheduler.has_work or core.in_flight or not asked:
        core.turn()
    core.turn()
    assert len(asked) > 2
    assert all(block != has_work for block, has_work in asked)


def test_core_captures_graphs_only_when_idle(checkpoint: Path) -> None:
    driver = Driver(checkpoint, captured=True, max_num_seqs=20)
    assert driver.runner.graphs
    sizes = list(driver.runner.graphs.sizes)
    driver.submit([1], 3)
    driver.run()
    assert driver.runner.graphs.sizes == sizes
    driver.turn()
    assert len(driver.runner.graphs.sizes) == len(sizes) + 1


def test_core_abort_of_last_request_reports_empty_engine(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    request_id = driver.submit([1, 2, 3], 50)
    driver.turn(3)
    driver.abort(request_id)
    driver.turn()
    last = driver.sent[-1]
    assert isinstance(last, StepOutputs)
    assert (last.tokens, last.stats.running, last.stats.blocks_held) == ([], 0, 0)


@modes
def test_core_confirms_each_message(checkpoint: Path, mode: dict[str, Any]) -> None:
    """Otherwise the client would take the engine for hung, or a hung one for idle."""
    driver = Driver(checkpoint, **mode)
    running = driver.submit([1, 2, 3], 50)
    driver.turn(3)
    messages = [Abort([999]), UnloadAdapter(1), Watch(998, False), Abort([running]), Abort([7])]
    for count, message in enumerate(messages, 2):  # the request was the first
        driver.inbox.append(message)
        driver.turn(3)
        last = [sent for sent in driver.sent if isinstance(sent, StepOutputs)][-1]
        assert last.num_handled == count, message


def test_core_rejection_is_sent_in_same_turn(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    driver.submit([], 5)
    driver.turn()
    assert isinstance(driver.sent[0], Rejected)


def test_runner_rounds_rows_so_that_onednn_compiles_few_kernels(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps 0.5 MB per row count of a linear layer: a server's memory would keep growing."""
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
    monkeypatch.setattr(driver.runner.forward, "round_up", lambda tokens, multiple: tokens)
    for length, before in answers.items():
        again = driver.submit(list(range(length)), 5)
        driver.run()
        assert driver.tokens(again) == driver.tokens(before)
    assert 119 in met, "rows were still rounded"
