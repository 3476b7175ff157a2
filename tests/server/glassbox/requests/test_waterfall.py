"""Each millisecond of a request goes to the part that an engine double has spent it on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from engine.protocol.outputs import Admission
from server.glassbox.requests.report import Reader, report
from server.glassbox.requests.step_log import Recorder
from server.glassbox.requests.step_model import fit
from server.glassbox.requests.waterfall import Waterfall, waterfall_of
from server.telemetry.phases import phases
from tests.support.scripted_steps import (
    CONSTANT,
    CONTEXT,
    DECODE,
    PREFILL,
    Ledger,
    ScriptedSteps,
)

OWN, LONG, SHORT = 11, 12, 13


@pytest.fixture
def recorder() -> Recorder:
    return Recorder([])


@pytest.fixture
def engine(recorder: Recorder) -> ScriptedSteps:
    """A double that has run enough steps, while a viewer watched, to know the model's cost."""
    double = ScriptedSteps(recorder._listeners)
    with recorder.lease():
        for job_id in (1, 2, 3):
            double.submit(job_id, 40 * job_id)
            double.step({job_id: 40 * job_id}, tuple(range(1, job_id)))
        for _ in range(5):
            double.step({}, (1, 2, 3))
            double.step({}, (1, 2))
        double.step({}, (1, 2, 3), finishes={1: "stop", 2: "stop", 3: "stop"})
    return double


def waterfall(recorder: Recorder, place: int = -1) -> Waterfall:
    request = recorder.requests[place]
    return waterfall_of(request, recorder.steps_of(request), fit(recorder.steps_for_fit()))


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def cost(ledgers: Iterable[Ledger], *job_ids: int) -> float:
    return sum(ledger.costs.get(job_id, 0.0) for ledger in ledgers for job_id in job_ids)


def check(found: Waterfall, expected: dict[str, float]) -> None:
    """Parts equal what the double has in its books, and sum to the wall time."""
    assert sum(found.parts.values()) == found.wall_us
    assert list(found.parts) == [
        "server",
        "queue",
        "encoder",
        "base",
        "own",
        "others",
        "waiting",
        "unexplained",
    ]
    for name, part in found.parts.items():
        assert abs(part - us(expected.get(name, 0.0))) <= 2, name  # two roundings


def test_fit_of_scripted_steps_finds_their_coefficients(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    model = fit(recorder.steps_for_fit())
    assert model.constant == pytest.approx(CONSTANT, rel=1e-6)
    assert model.prefill == pytest.approx(PREFILL, rel=1e-6)
    assert model.decode == pytest.approx(DECODE, rel=1e-6)
    assert model.context == pytest.approx(CONTEXT, rel=1e-4)
    assert model.r2 == pytest.approx(1.0)
    assert model.num_steps == len(engine.ledgers)


def test_waterfall_of_request_among_others_is_exact(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    arrival = engine.now
    engine.submit(LONG, 500)
    engine.wait(0.009)
    engine.submit(OWN, 100)
    opened = recorder.begin("req_a", "", arrival, [OWN])
    waited = [engine.step({LONG: 200}), engine.step({LONG: 200})]
    ran = [engine.step({LONG: 100, OWN: 60}), engine.step({OWN: 40}, (LONG,))]
    engine.submit(SHORT, 30)
    ran += [engine.step({SHORT: 30}, (LONG, OWN))]
    ran += [engine.step({}, (LONG, OWN, SHORT), stall=0.004) for _ in range(3)]
    ran += [engine.step({}, (LONG, OWN, SHORT), finishes={OWN: "length"})]
    engine.step({}, (LONG, SHORT))  # after its last token: not its concern
    ended = engine.now + 0.002
    engine.end(recorder, opened, after=0.002)
    # The model is fitted to the stalls too, so take that of the steps without them.
    model = fit([s for s in recorder.steps_for_fit() if s.end <= waited[0].begin])
    request = recorder.requests[-1]
    found = waterfall_of(request, recorder.steps_of(request), model)
    queue = waited[-1].end - waited[0].begin
    server = 0.009 + ended - ran[-1].end
    check(
        found,
        {
            "server": server,
            "queue": queue,
            "base": CONSTANT * len(ran),
            "own": cost(ran, OWN),
            "others": cost(ran, LONG, SHORT),
            "unexplained": 3 * 0.004,
        },
    )
    assert found.wall_us == us(ended - arrival)
    assert [neighbour.id for neighbour in found.neighbours] == [LONG, SHORT]
    long, short = found.neighbours
    assert abs(long.queue_us - us(queue)) <= 1
    assert short.queue_us == 0
    assert abs(long.others_us - us(cost(ran, LONG))) <= 1
    assert abs(short.others_us - us(cost(ran, SHORT))) <= 1
    assert (long.prompt_tokens, short.prompt_tokens) == (500, 30)
    assert (long.num_decodes, short.num_decodes) == (6, 4)
    assert [share.is_queue for share in found.steps] == [True] * 2 + [False] * 7
    for share, ledger in zip(found.steps, chain(waited, ran), strict=True):
        assert share.unexplained == pytest.approx(0.0 if share.is_queue else ledger.stall, abs=1e-6)
        assert (share.begin, share.end) == (ledger.begin, ledger.end)


def test_waterfall_of_queue_splits_steps_by_cost(recorder: Recorder, engine: ScriptedSteps) -> None:
    engine.submit(LONG, 300)
    engine.submit(SHORT, 30)
    engine.step({SHORT: 30, LONG: 100})
    engine.submit(OWN, 10)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    waited = engine.step({LONG: 200}, (SHORT,))
    engine.step({OWN: 10}, (LONG, SHORT), finishes={OWN: "stop"})
    engine.end(recorder, opened, after=0.0)
    found = waterfall(recorder)
    duration, total = waited.end - waited.begin, sum(waited.costs.values())
    shares = {one.id: one.queue_us for one in found.neighbours}
    # SHORT's length is known only since its prefill: it was not recorded.
    assert shares[LONG] + shares[SHORT] == pytest.approx(us(duration), abs=2)
    assert shares[LONG] == pytest.approx(us(duration * waited.costs[LONG] / total), rel=0.01)


def test_waterfall_of_preempted_request_counts_waiting_as_queue_and_recomputing_as_own(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(OWN, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    engine.submit(LONG, 80)
    ran = [engine.step({OWN: 50, LONG: 80}), engine.step({}, (OWN, LONG))]
    engine.preempt(OWN)
    waited = [engine.step({}, (LONG,)) for _ in range(4)]
    ran += [engine.step({OWN: 52}, (LONG,)), engine.step({}, (OWN, LONG), finishes={OWN: "stop"})]
    request = engine.end(recorder, opened, after=0.001)
    check(
        waterfall(recorder),
        {
            "server": 0.001,
            "queue": waited[-1].end - waited[0].begin,
            "base": CONSTANT * 4,
            "own": cost(ran, OWN),
            "others": cost(ran, LONG),
        },
    )
    assert request.choices[0].num_preemptions == 1


def test_waterfall_of_two_choices_is_that_of_both_together(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(OWN, 50)
    engine.submit(OWN + 10, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN, OWN + 10])
    ran = [engine.step({OWN: 50}), engine.step({OWN + 10: 50}, (OWN,))]
    ran += [engine.step({}, (OWN, OWN + 10), finishes={OWN: "stop"})]
    ran += [engine.step({}, (OWN + 10,), finishes={OWN + 10: "length"})]
    engine.end(recorder, opened, after=0.0)
    expected = {"base": CONSTANT * 4, "own": cost(ran, OWN, OWN + 10)}
    check(waterfall(recorder), expected)


def test_waterfall_of_request_aborted_in_the_queue_is_queue(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(LONG, 400)
    engine.submit(OWN, 50)
    begin = engine.now
    opened = recorder.begin("req_a", "", begin, [OWN])
    engine.step({LONG: 400})
    engine.end(recorder, opened, after=0.05, error="disconnect")
    found = waterfall(recorder)
    check(found, {"queue": engine.now + 0.05 - begin})
    assert found.neighbours[0].queue_us == us(engine.ledgers[-1].end - begin)


def test_waterfall_of_request_aborted_while_it_runs_ends_at_its_end(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(OWN, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    ran = [engine.step({OWN: 50}), engine.step({}, (OWN,))]
    engine.end(recorder, opened, after=0.003, error="disconnect")
    check(
        waterfall(recorder),
        {"base": 2 * CONSTANT, "own": cost(ran, OWN), "unexplained": 0.003},
    )


def test_waterfall_of_request_submitted_during_a_step_counts_its_rest(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(LONG, 400)
    engine.submit(OWN, 50)
    engine.jobs[OWN].submitted += 0.01  # the step below is running then
    opened = recorder.begin("req_a", "", engine.jobs[OWN].submitted, [OWN])
    waited = engine.step({LONG: 400})
    ran = engine.step({OWN: 50}, (LONG,), finishes={OWN: "length"})
    engine.end(recorder, opened, after=0.0)
    found = waterfall(recorder)
    queue = waited.end - waited.begin - 0.01
    check(
        found,
        {
            "queue": queue,
            "base": CONSTANT,
            "own": ran.costs[OWN],
            "others": ran.costs[LONG],
        },
    )
    assert abs(found.neighbours[0].queue_us - us(queue)) <= 1


def test_waterfall_without_steps_is_queue_and_unexplained(recorder: Recorder) -> None:
    engine = ScriptedSteps([])  # without a listener
    job = engine.submit(OWN, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    engine.wait(0.02)
    run = engine.step({OWN: 50}, finishes={OWN: "length"})
    engine.end(recorder, opened, after=0.0)
    assert job.admission is not None
    assert job.admission.at == run.begin
    check(waterfall(recorder), {"queue": 0.02, "unexplained": run.end - run.begin})


def encoded(begin: float, ready: float, seconds: float) -> Admission:
    """Return what an admission says of one image, and another that had been encoded before."""
    return Admission(
        0,
        0.0,
        0,
        images_encoded=1,
        images_reused=1,
        images_ready=ready,
        encode_begin=begin,
        encode_seconds=seconds,
        encode_units=4,
    )


def test_encoder_of_an_idle_engine_is_taken_out_of_the_queue(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    job = engine.submit(OWN, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    job.images = encoded(engine.now + 0.004, engine.now + 0.044, 0.040)
    engine.wait(0.050)
    run = engine.step({OWN: 50}, finishes={OWN: "length"})
    request = engine.end(recorder, opened, after=0.0)
    found = waterfall(recorder)
    parts = {"queue": 0.010, "encoder": 0.040, "base": CONSTANT, "own": run.costs[OWN]}
    check(found, parts)
    document = report(request, found, fit(recorder.steps_for_fit()), Reader(True, {}))
    stamps = document["stamps"]
    assert (stamps["encode_begin"], stamps["images_ready"]) == pytest.approx((4.0, 44.0))
    shown = {"encoded": 1, "reused": 1, "units": 4, "encode_ms": 40.0, "wait_ms": 4.0}
    assert document["choices"][0]["images"] == pytest.approx(shown)
    names = [phase.name for phase in phases(request.choices[0], engine.now)]
    assert names == ["queue", "encode images", "prefill", "decode", "detokenise"]


def test_encoder_between_steps_of_others_costs_no_neighbour(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.submit(LONG, 300)
    engine.submit(SHORT, 30)
    engine.step({SHORT: 30, LONG: 100})
    job = engine.submit(OWN, 50)
    opened = recorder.begin("req_a", "", engine.now, [OWN])
    job.images = encoded(engine.now, engine.now + 0.030, 0.030)
    waited = engine.step({LONG: 200}, (SHORT,), stall=0.030)  # a unit before the step
    ran = engine.step({OWN: 50}, (LONG,), finishes={OWN: "length"})
    engine.end(recorder, opened, after=0.0)
    # The model is fitted to the stall too, so take that of the steps without it.
    model = fit([s for s in recorder.steps_for_fit() if s.end <= waited.begin])
    request = recorder.requests[-1]
    found = waterfall_of(request, recorder.steps_of(request), model)
    queue = waited.end - waited.begin - 0.030
    own, others = ran.costs[OWN], ran.costs[LONG]
    parts = {"queue": queue, "encoder": 0.030, "base": CONSTANT, "own": own, "others": others}
    check(found, parts)
    assert abs(sum(one.queue_us for one in found.neighbours) - us(queue)) <= 2


def test_waits_for_a_core_are_a_part_of_their_own(
    recorder: Recorder, engine: ScriptedSteps
) -> None:
    engine.wait_listener = recorder._on_waits
    arrival = engine.now
    engine.submit(OWN, 100)
    opened = recorder.begin("req_w", "", arrival, [OWN])
    engine.wait(0.030)  # the engine's process had no core, and then computed
    ran = [engine.step({OWN: 100}, stall=0.050, waits=(0.025, 0.040, 0.060))]
    # Two threads waited at once, then one after the other, then longer than the step took.
    ran += [engine.step({}, (OWN,), stall=0.020, waits=(0.0, 0.020, 0.040))]
    ran += [engine.step({}, (OWN,), stall=0.040, waits=(0.0, 0.020, 0.040))]
    ran += [engine.step({}, (OWN,), stall=0.007, waits=(0.0, 0.0, 0.0))]
    ran += [engine.step({}, (OWN,), finishes={OWN: "length"})]
    engine.end(recorder, opened, after=0.0)
    steps = recorder.steps_for_fit()
    model = fit([s for s in steps if s.end <= ran[0].begin])
    request = recorder.requests[-1]
    check(
        waterfall_of(request, recorder.steps_of(request), model),
        {
            "queue": 0.005,
            "base": CONSTANT * len(ran),
            "own": cost(ran, OWN),
            "waiting": 0.025 + 0.050 + 0.020 + 0.040,
            "unexplained": 0.007,
        },
    )


def test_fit_is_that_of_steps_that_do_not_wait(recorder: Recorder, engine: ScriptedSteps) -> None:
    engine.wait_listener = recorder._on_waits
    plain = fit(recorder.steps_for_fit())
    with recorder.lease():
        engine.submit(LONG, 60)
        engine.step({LONG: 60}, stall=0.2, waits=(0.0, 0.2, 0.2))
        for turn in range(30):
            wait = 0.01 * (1 + turn % 7)
            engine.step({}, (LONG,), stall=wait, waits=(0.0, wait, wait))
    model = fit(recorder.steps_for_fit())
    assert (model.constant, model.decode) == pytest.approx((plain.constant, plain.decode), rel=1e-4)
    assert model.r2 == pytest.approx(1.0, abs=1e-4)
