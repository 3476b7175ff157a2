"""The simulator against manual calculation; loadtest/simulator_check.py uses real replicas."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import msgspec
import pytest

from deploy.ray.policies import POLICIES
from engine.config import EngineConfig
from loadtest import simulate
from loadtest.measure import Slo
from loadtest.schedule import Ask, asks, timetable, token_ids
from loadtest.simulate import FittedReplica, Question, Simulation
from loadtest.simulator_check import errors
from loadtest.step_time import Scrape, StepTime, fit
from loadtest.workload import Shape, fixed, mix

STEP = StepTime(
    step=0.010, prefill_token=0.0001, decode_token=0.001, context_token=0.0, frontend=0.005
)
VOCABULARY = range(1, 1000)


def fitted(step_time: StepTime = STEP, num_blocks: int = 1000, **config: object) -> FittedReplica:
    settings = msgspec.convert({"block_size": 16, **config}, EngineConfig)
    return FittedReplica(settings, num_blocks, 1024, 256, step_time)


def simulation(replicas: int = 1, policy: str = "least-loaded", **more: object) -> Simulation:
    return Simulation(fitted(**more), replicas, POLICIES[policy]())  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=length)


def test_simulation_one_request_takes_the_time_of_its_steps() -> None:
    [alone] = simulation().open_loop([Ask(1.0, prompt(300), 3)])
    # Steps: 256 prompt tokens; 44 prompt tokens and the first token; two more tokens.
    first = 0.005 + (0.010 + 0.0256) + (0.010 + 0.0044)
    assert alone.ttft == pytest.approx(first)
    assert alone.completion.arrivals == pytest.approx(
        [1 + first, 1 + first + 0.011, 1 + first + 0.022]
    )
    assert alone.completion.tokens == 3
    assert alone.completion.prompt_tokens == 300


def test_simulation_arrival_during_a_step_joins_the_next_step() -> None:
    a, b = simulation().open_loop([Ask(0.0, prompt(100), 2), Ask(0.003, prompt(50, 1), 1)])
    end = 0.005 + 0.010 + 0.010  # end of the first step
    assert a.completion.arrivals[0] == pytest.approx(end)
    shared = end + 0.010 + 0.001 + 0.005  # a's second token and b's prompt
    assert a.completion.arrivals[1] == pytest.approx(shared)
    assert b.completion.arrivals == pytest.approx([shared])


def test_simulation_context_cost_counts_held_blocks() -> None:
    plain, long = (
        simulation(step_time=msgspec.structs.replace(STEP, context_token=cost))
        for cost in (0.0, 1e-5)
    )
    [before], [after] = (s.open_loop([Ask(0.0, prompt(100), 1)]) for s in (plain, long))
    assert after.ttft is not None
    assert before.ttft is not None
    assert after.ttft - before.ttft == pytest.approx(7 * 16 * 1e-5)  # whole blocks


def test_simulation_repeated_prompt_hits_the_prefix_cache() -> None:
    plan = [Ask(float(at), prompt(320), 1) for at in range(3)]
    affine = simulation(2, "prefix").open_loop(plan)
    assert [m.completion.cached_tokens for m in affine] == [0, 304, 304]
    without = simulation(2, "prefix", enable_prefix_caching=False).open_loop(plan)
    assert [m.completion.cached_tokens for m in without] == [0, 0, 0]


def test_simulation_closed_loop_with_two_replicas_is_twice_as_fast() -> None:
    def answered(replicas: int) -> int:
        endless = asks(fixed(200, 20), VOCABULARY, 0)
        done = simulation(replicas).closed_loop(endless, 16, 30.0)
        return sum(m.completion.ended <= 30 for m in done)

    one, two = answered(1), answered(2)
    assert 1.5 * one < two < 2.1 * one


def test_simulation_closed_loop_keeps_to_its_concurrency() -> None:
    done = simulation().closed_loop(asks(fixed(50, 5), VOCABULARY, 0), 3, 5.0)
    changes = sorted(
        itertools.chain(((m.intended, 1) for m in done), ((m.completion.ended, -1) for m in done))
    )
    assert max(itertools.accumulate(change for _, change in changes)) == 3
    assert max(m.intended for m in done) < 5.0


def test_simulation_full_queue_rejects_by_length_and_by_wait() -> None:
    burst = [Ask(0.001 * number, prompt(250, number), 50) for number in range(40)]
    by_length = simulation(max_num_queued_reqs=3, max_num_seqs=2).open_loop(burst)
    rejected = [m for m in by_length if m.completion.error == "rejected"]
    assert 30 < len(rejected) < 38
    steady = [Ask(0.1 * number, prompt(250, number), 50) for number in range(100)]
    by_time = simulation(max_queue_wait=0.5, max_num_seqs=4).open_loop(steady)
    unbounded = simulation(max_num_seqs=4).open_loop(steady)
    kept = [m.ttft or 0 for m in by_time if not m.completion.error]
    assert max(kept) < 3 < max(m.ttft or 0 for m in unbounded)
    assert len(kept) > 10


def test_question_fewest_finds_minimum_replicas_and_their_cost() -> None:
    rate, seconds = 20.0, 20.0
    plan = timetable(mix(), rate, seconds, VOCABULARY, 0)
    slo = Slo.parse("ttft=200ms,itl=60ms")
    question = Question(fitted(), plan, rate, seconds, "least-loaded", slo, price=2.0)
    *fewer, enough = question.fewest(0.95)
    assert fewer, "one replica is enough, so this load tests nothing"
    assert [p.replicas for p in (*fewer, enough)] == list(range(1, enough.replicas + 1))
    assert all((p.attainment or 0) < 0.95 for p in fewer)
    assert (enough.attainment or 0) >= 0.95
    hourly = enough.point.tokens_per_s * 3600
    assert enough.cost == pytest.approx(enough.replicas * 2.0 / (hourly / 1e6))
    hopeless = Question(fitted(), plan, rate, seconds, "random", Slo.parse("ttft=1ms"))
    assert [p.replicas for p in hopeless.fewest(0.95)] == [simulate.MAX_REPLICAS]


def test_simulate_command_prints_result_or_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.json"
    model.write_bytes(msgspec.json.encode(fitted()))

    def run(*arguments: str) -> None:
        command = ["simulate", "mix", "--rate", "20", "--seconds", "5", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        simulate.main()

    run("--model", str(model), "--slo", "ttft=300ms", "--attainment", "0.9", "--price", "1.5")
    lines = capsys.readouterr().out.splitlines()
    assert "keep the objective" in lines[-1]
    assert "per million output tokens" in lines[-1]
    for arguments, words in (
        (["--model", str(tmp_path / "none"), "--slo", "ttft=1s"], "none"),
        (["--model", str(model)], "--slo"),
        (["--model", str(model), "--slo", "ttft=1"], "--slo"),
        (["--model", str(model), "--slo", "ttft=1ms"], "no number of replicas"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(*arguments)


def runs(model: StepTime, noise: float) -> list[list[Scrape]]:
    """Return the metrics that servers with these step times would report under four loads."""
    rng = random.Random(0)
    found = []
    for decodes, prompts in ((1, 0), (12, 5), (2, 200), (6, 40)):
        scrapes = [Scrape(0.0, 0, 0, 0, 16.0 * decodes, 0.0, 0)]
        for _ in range(10):
            last = scrapes[-1]
            steps = rng.randint(20, 60)
            context = 400.0 * decodes + rng.random()
            held = (last.context + context) / 2
            prefill, decode = steps * prompts * rng.random(), steps * decodes * rng.random()
            seconds = (
                model.step * steps
                + model.prefill_token * prefill
                + model.decode_token * decode
                + model.context_token * held * steps
            )
            scrapes.append(
                Scrape(
                    last.at + seconds * (1 + noise * rng.uniform(-1, 1)),
                    last.steps + steps,
                    last.prefill + prefill,
                    last.decode + decode,
                    context,
                    last.waited + 2.0,
                    last.requests + 10,
                )
            )
        found.append(scrapes)
    return found


def test_fit_recovers_the_coefficients() -> None:
    model = StepTime(0.004, 0.0002, 0.0005, 2e-6)
    found = fit(runs(model, 0.02), ttft=[0.25, 0.27])
    assert found.step == pytest.approx(model.step, rel=0.1)
    assert found.prefill_token == pytest.approx(model.prefill_token, rel=0.1)
    assert found.decode_token == pytest.approx(model.decode_token, rel=0.1)
    assert found.context_token == pytest.approx(model.context_token, rel=0.1)
    assert found.frontend == pytest.approx(0.26 - 0.2)


def test_fit_of_machine_with_varying_speed_uses_the_average() -> None:
    """A fast interval has more steps than a slow one, and must not dominate the fit."""
    rng, scrapes = random.Random(0), [Scrape(0.0, 0, 0, 0, 0.0, 0.0, 0)]
    for _ in range(200):
        last, steps = scrapes[-1], rng.choice((20, 180))
        scrapes.append(Scrape(last.at + 0.5, last.steps + steps, 0, 0, 0.0, 0.0, 0))
    found = fit([scrapes], ttft=[0.1])
    assert found.step == pytest.approx(0.5 / 100, rel=0.1)


def test_fit_has_no_negative_term_and_refuses_too_few_data() -> None:
    found = fit(runs(StepTime(0.004, 0.0, 0.0, 0.0), 0.3), ttft=[0.1])
    assert min(msgspec.structs.astuple(found)) >= 0.0
    assert found.frontend == 0.0, "a client cannot see a token before the engine has made it"
    with pytest.raises(ValueError, match="too few"):
        fit(runs(STEP, 0.0)[:1], ttft=[0.1])
    with pytest.raises(ValueError, match="too few"):
        fit(runs(STEP, 0.0), ttft=[])


def test_errors_of_a_trace_without_common_prefixes_are_finite() -> None:
    """Of the hit rate they are the difference, of other figures the ratio."""
    figures = {"ttft_p50_ms": 10.0, "ttft_p90_ms": 20.0, "itl_p50_ms": 5.0, "tokens_per_s": 100.0}
    measured = figures | {"hit_rate": 0.0}
    predicted = figures | {"tokens_per_s": 110.0, "hit_rate": 0.02}
    found = errors([{"open": {"measured": measured, "predicted": predicted}}], "open")
    assert found == pytest.approx(
        dict.fromkeys(figures, 0.0) | {"tokens_per_s": 0.1, "hit_rate": 0.02}
    )


def test_timetable_with_equal_seed_is_equal_and_has_the_given_rate() -> None:
    one, two = (timetable(mix(), 50.0, 20.0, VOCABULARY, 3) for _ in range(2))
    assert one == two
    assert one != timetable(mix(), 50.0, 20.0, VOCABULARY, 4)
    assert 850 < len(one) < 1150
    assert all(0 < a.at < b.at < 20 for a, b in itertools.pairwise(one))


def test_token_ids_of_equal_blocks_are_equal() -> None:
    one, two = (
        token_ids(Shape(40, 1, ("a", name), 16), VOCABULARY, random.Random(name)) for name in "bc"
    )
    assert len(one) == len(two) == 40
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[32:] != two[32:]
