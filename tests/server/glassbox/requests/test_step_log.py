"""The recorder listens only while it is leased, and keeps within its bounds."""

from __future__ import annotations

from unittest import mock

from engine.protocol.outputs import EngineStats, PrefillChunk, StepOutputs, TokenOutput
from server.glassbox.requests import step_log as module
from server.glassbox.requests.step_log import FIT_STEPS, GONE, MAX_REQUESTS, Recorder
from tests.support.scripted_steps import ScriptedSteps


def test_recorder_listens_while_it_is_leased_only() -> None:
    listeners: list = []
    recorder = Recorder(listeners)
    assert not listeners
    with recorder.lease():
        with recorder.lease():
            assert len(listeners) == 1
        assert recorder.is_leased
        assert len(listeners) == 1
    assert not listeners
    assert not recorder.is_leased


def test_recorder_gives_lease_back_after_an_error() -> None:
    recorder = Recorder([])
    try:
        with recorder.lease():
            raise ValueError
    except ValueError:
        pass
    assert not recorder.is_leased


def test_recorded_request_holds_a_lease_until_its_end() -> None:
    listeners: list = []
    recorder = Recorder(listeners)
    engine = ScriptedSteps(listeners)
    engine.submit(1, 5)
    opened = recorder.begin("req", "", engine.now, [1])
    assert len(listeners) == 1
    assert recorder.open_requests == [opened]
    engine.step({1: 5}, finishes={1: "stop"})
    request = engine.end(recorder, opened, after=0.0)
    assert not listeners
    assert not recorder.open_requests
    assert len(recorder.steps_of(request)) == 1


def test_recorder_keeps_the_last_requests_and_the_steps_they_need() -> None:
    recorder = Recorder([])
    engine = ScriptedSteps(recorder._listeners)
    with recorder.lease():
        for number in range(1, MAX_REQUESTS + 10):
            engine.submit(number, 5)
            opened = recorder.begin(f"req_{number}", "", engine.now, [number])
            engine.step({number: 5}, finishes={number: "stop"})
            engine.end(recorder, opened, after=0.0)
        engine.submit(1000, 5)
        engine.step({1000: 5})
        for _ in range(FIT_STEPS + 100):
            engine.step({}, (1000,))
    kept = recorder.requests
    assert [one.opened.request_id for one in kept] == [
        f"req_{number}" for number in range(10, MAX_REQUESTS + 10)
    ]
    assert all(len(recorder.steps_of(one)) == 1 for one in kept)
    assert len(recorder.steps_for_fit()) == FIT_STEPS
    assert len(recorder._steps) == FIT_STEPS + 100 + 1 + MAX_REQUESTS


def test_recorder_without_requests_keeps_the_steps_of_the_fit_only() -> None:
    recorder = Recorder([])
    engine = ScriptedSteps(recorder._listeners)
    with recorder.lease():
        engine.submit(1, 5)
        engine.step({1: 5})
        for _ in range(FIT_STEPS + 7):
            engine.step({}, (1,))
    assert len(recorder._steps) == FIT_STEPS


def test_recorder_forgets_steps_beyond_its_bytes() -> None:
    recorder = Recorder([])
    engine = ScriptedSteps(recorder._listeners)
    engine.submit(1, 5)
    with mock.patch.object(module, "STEP_BYTES", 4000):
        opened = recorder.begin("req", "", engine.now, [1])
        engine.step({1: 5})
        for _ in range(50):
            engine.step({}, (1,))
        request = engine.end(recorder, opened, after=0.0)
    kept = recorder.steps_of(request)
    assert 0 < len(kept) < 20
    assert sum(step.num_bytes for step in kept) <= 4000
    assert kept[-1].end == engine.now


def test_recorder_forgets_requests_beyond_their_bytes() -> None:
    with mock.patch.object(module, "REQUEST_BYTES", 3000):
        recorder = Recorder([])
        engine = ScriptedSteps(recorder._listeners)
        for number in range(1, 20):
            engine.submit(number, 5)
            opened = recorder.begin(f"req_{number}", "", engine.now, [number])
            engine.step({number: 5}, finishes={number: "stop"})
            engine.end(recorder, opened, after=0.0)
    assert 1 < len(recorder.requests) < 6
    assert recorder.requests[-1].opened.request_id == "req_19"


def test_step_with_a_dropped_decode_counts_it_as_gone() -> None:
    recorder = Recorder([])
    with recorder.lease():
        stats = EngineStats(step=1, step_seconds=0.01, step_decode_tokens=2)
        recorder._listeners[0](StepOutputs(1.0, [TokenOutput(5, 7)], [], stats))
    [step] = recorder.steps_for_fit()
    assert step.decode_ids.tolist() == [5, GONE]
    assert step.contexts.tolist() == [0, 0]


def test_step_that_encodes_a_source_gives_its_tokens_to_the_request() -> None:
    recorder = Recorder([])
    with recorder.lease():
        stats = EngineStats(step=1, step_seconds=0.01, step_prefill_tokens=20, step_decode_tokens=2)
        tokens = [TokenOutput(5, 7), TokenOutput(6, 7)]
        prefills = [PrefillChunk(6, 0, 1)]  # sampled, so the stats count it as a decode
        recorder._listeners[0](StepOutputs(1.0, tokens, [], stats, prefills=prefills))
    [step] = recorder.steps_for_fit()
    assert step.decode_ids.tolist() == [5]
    assert (step.encoded_ids, step.encoded_tokens) == ((6,), 20)


def test_steps_of_a_busy_engine_leave_no_gap_and_those_of_an_idle_one_do() -> None:
    recorder = Recorder([])
    with recorder.lease():
        for at, running in ((1.0, 1), (1.5, 0), (3.0, 1), (3.1, 1)):
            stats = EngineStats(step=1, step_seconds=0.2, running=running, step_decode_tokens=1)
            recorder._listeners[0](StepOutputs(at, [TokenOutput(5, 7)], [], stats))
    begins = [step.begin for step in recorder.steps_for_fit()]
    assert begins == [0.8, 1.0, 2.8, 3.0]


def test_stats_without_a_step_are_not_recorded() -> None:
    recorder = Recorder([])
    with recorder.lease():
        recorder._listeners[0](StepOutputs(1.0, [], [], EngineStats(step=3)))
    assert not recorder.steps_for_fit()
