"""The simulator against manual calculation; loadtest/simulator_check.py uses real replicas."""

from __future__ import annotations

import itertools
import random
import sys
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from deploy.ray.policies import POLICIES
from engine.config import EngineConfig
from engine.protocol.ready import KVGroup
from loadtest import simulate, simulator_check
from loadtest.calibration import Calibration
from loadtest.measure import Load, Slo, point
from loadtest.schedule import Ask, asks, timetable, token_ids
from loadtest.simulate import Question
from loadtest.simulation import Clients, FittedReplica, Simulation, Work
from loadtest.simulator_check import Asked, Rounds, Run, errors
from loadtest.step_time import RequestTime, StepTime
from loadtest.workload import Shape, fixed, mix

STEP = StepTime(
    decodes=((1, 0.011), (11, 0.021)),
    context_token=0.0,
    prefill_step=0.010,
    prompt=0.0,
    prefill_token=0.0001,
    attention=0.0,
)
API = RequestTime(request=0.005)
VOCABULARY = range(1, 1000)


def fitted(
    step_time: StepTime = STEP,
    num_blocks: int = 1000,
    context_cost: float = 0.0,
    api_time: RequestTime = API,
    channel_time: float = 0.0,
    **config: object,
) -> FittedReplica:
    settings = msgspec.convert({"block_size": 16, **config}, EngineConfig)
    return FittedReplica(
        config=settings,
        threads=1,
        num_blocks=num_blocks,
        max_model_len=1024,
        max_num_batched_tokens=256,
        context_cost=context_cost,
        part_size=0,
        groups=(KVGroup(1),),
        cores=2,
        step_time=step_time,
        api_time=api_time,
        channel_time=channel_time,
    )


def simulation(
    replicas: int = 1,
    policy: str = "least-loaded",
    clients: Clients | None = None,
    **more: object,
) -> Simulation:
    replica = fitted(**more)  # type: ignore[arg-type]
    return Simulation(replica, replicas, POLICIES[policy](), clients)


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
    assert a.completion.arrivals[0] == pytest.approx(end, abs=1e-6)
    shared = end + 0.010 + 0.001 + 0.005  # a's second token and b's prompt
    assert a.completion.arrivals[1] == pytest.approx(shared, abs=1e-6)
    assert b.completion.arrivals == pytest.approx([shared], abs=1e-6)


def test_simulation_contexts_of_prompts_and_decodes_cost() -> None:
    plain, long = (
        simulation(step_time=msgspec.structs.replace(STEP, context_token=cost, attention=cost / 10))
        for cost in (0.0, 1e-5)
    )
    [before], [after] = (s.open_loop([Ask(0.0, prompt(100), 2)]) for s in (plain, long))
    first, second = (
        slow - fast
        for slow, fast in zip(after.completion.arrivals, before.completion.arrivals, strict=True)
    )
    assert first == pytest.approx(100 * 50 * 1e-6), "each token attends to 50 others on average"
    assert second - first == pytest.approx(100 * 1e-5)


def test_simulation_chunks_behind_long_contexts_are_smaller_with_a_decode() -> None:
    plan = [Ask(0.0, prompt(10), 60), Ask(0.1, prompt(900, 1), 1)]
    constant, shrinking = (
        simulation(context_cost=cost).open_loop(plan)[1].ttft or 0 for cost in (0.0, 0.01)
    )
    assert shrinking > constant + 2 * STEP.prefill_step


def test_simulation_outputs_take_time_in_the_api_process_and_the_client() -> None:
    api = RequestTime(0.005, 1e-5, message=0.0005, wake=0.001, cold_wake=0.002, event=0.003)
    client = RequestTime(0.003, wake=0.002, cold_wake=0.001, event=0.004)
    simulated = simulation(api_time=api, clients=Clients(1.0, client))
    [alone] = simulated.open_loop([Ask(0.0, prompt(100), 1)])
    engine = 0.010 + 0.010
    sending = 0.005 + 100 * 1e-5
    receiving = 0.0005 + 0.003
    # Both wake twice. The only core is idle before the request alone.
    worked = simulated.worked
    assert worked.engines == pytest.approx(engine)
    assert worked.apis == pytest.approx(sending + receiving + 2 * 0.001 + 0.002, abs=1e-6)
    assert worked.client == pytest.approx(0.003 + 0.004 + 2 * 0.002 + 0.001, abs=1e-6)
    together = worked.engines + worked.apis + worked.client
    # The API process wakes the client in the middle of its event, and ends it before or after.
    assert together - 0.003 / 2 - 1e-6 <= (alone.ttft or 0) <= together + 1e-6


def test_simulation_messages_pass_both_ends_of_the_channel() -> None:
    simulated = simulation(channel_time=0.002)
    [alone] = simulated.open_loop([Ask(0.0, prompt(100), 1)])
    # The request passes both ends, and so does the output: each wakes the next in the middle.
    assert alone.ttft == pytest.approx(0.005 + 0.020 + 4 * 0.001, abs=1e-6)
    assert simulated.worked.apis == pytest.approx(0.005 + 2 * 0.002, abs=1e-6)


def test_simulation_tokens_that_wait_for_the_api_process_share_an_event() -> None:
    # The second request occupies the API process for 50 ms, and a step takes 11 ms.
    api = RequestTime(0.0, 0.001)
    plan = [Ask(0.0, prompt(1), 20), Ask(0.1, prompt(50, 1), 1)]
    alone, beside = (simulation(api_time=api).open_loop(each)[0] for each in (plan[:1], plan))
    assert len(alone.completion.arrivals) == alone.completion.tokens == 20
    assert beside.completion.tokens == 20
    assert 20 - 5 <= len(beside.completion.arrivals) <= 20 - 3


def test_simulation_reads_waiting_messages_at_once() -> None:
    api = RequestTime(0.0, 0.001, message=1e-5, event=1e-4)
    simulated = simulation(api_time=api)
    measured = simulated.open_loop([Ask(0.0, prompt(1), 20), Ask(0.1, prompt(50, 1), 1)])
    events = sum(len(each.completion.arrivals) for each in measured)
    assert events < 21
    messages = 20  # a step has outputs of both requests
    assert simulated.worked.apis == pytest.approx(51 * 0.001 + messages * 1e-5 + events * 1e-4)


def arrivals_of_a_step(api: RequestTime, client: RequestTime) -> list[float]:
    """Return when the events of a step arrive that completes four prompts."""
    busy, *plan = Ask(0.0, prompt(100, 9), 1), *(Ask(0.001, prompt(1, n), 1) for n in range(4))
    simulated = simulation(api_time=api, clients=Clients(4.0, client))
    done = simulated.open_loop([busy, *plan])[1:]
    return sorted(each.completion.arrivals[0] for each in done)


def test_simulation_client_reads_events_while_the_api_process_sends_others() -> None:
    arrivals = arrivals_of_a_step(RequestTime(event=0.004), RequestTime(event=0.001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert gaps == pytest.approx([0.004] * 3, abs=1e-6)


def test_simulation_client_reads_events_that_wait_at_once() -> None:
    first, *others = arrivals_of_a_step(RequestTime(), RequestTime(event=0.004))
    assert others == pytest.approx([first + 3 * 0.004] * 3, abs=1e-6)


def test_simulation_replicas_that_share_a_core_are_no_faster_than_one() -> None:
    def answered(replicas: int, cores: float) -> int:
        endless = asks(fixed(200, 20), VOCABULARY, 0)
        clients = Clients(cores, RequestTime())
        api = RequestTime()
        run = simulation(replicas, clients=clients, api_time=api)
        return sum(m.completion.ended <= 20 for m in run.closed_loop(endless, 8, 20.0))

    one, sharing, two = answered(1, 1.0), answered(2, 1.0), answered(2, 2.0)
    assert sharing <= one
    assert two == pytest.approx(2 * sharing, rel=0.05)


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
    unbounded = simulation(max_queue_wait=600, max_num_seqs=4).open_loop(steady)
    kept = [m.ttft or 0 for m in by_time if not m.completion.error]
    assert max(kept) < 3 < max(m.ttft or 0 for m in unbounded)
    assert len(kept) > 10


@pytest.mark.slow
def test_question_fewest_finds_minimum_replicas_and_their_cost() -> None:
    rate, seconds = 20.0, 8.0
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
    earlier = tmp_path / "earlier.json"
    earlier.write_bytes(model.read_bytes().replace(b'"wake"', b'"read"'))
    for arguments, words in (
        (["--model", str(tmp_path / "none"), "--slo", "ttft=1s"], "none"),
        (["--model", str(earlier), "--slo", "ttft=1s"], "unknown field `read`"),
        (["--model", str(model)], "--slo"),
        (["--model", str(model), "--slo", "ttft=1"], "--slo"),
        (["--model", str(model), "--slo", "ttft=1ms"], "no number of replicas"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(*arguments)


def test_errors_of_a_trace_without_common_prefixes_are_finite() -> None:
    """Of the hit rate they are the difference, of other figures the ratio."""
    times = dict.fromkeys(("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "tpot_p50_ms"), 10.0)
    figures = times | {"tokens_per_s": 100.0}
    measured = figures | {"hit_rate": 0.0}
    predicted = figures | {"tokens_per_s": 110.0, "hit_rate": 0.02}
    found = errors([{"open": {"measured": measured, "predicted": predicted}}], "open")
    assert found == pytest.approx(
        dict.fromkeys(figures, 0.0) | {"tokens_per_s": 0.1, "hit_rate": 0.02}
    )


async def test_check_repeats_disturbed_rounds_and_calibrates_around_each_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = iter((0.05, 0.7, 0.02))
    order = itertools.count()

    async def take(self: Calibration, servers: object) -> None:
        self.client_cpu.append(next(order))

    async def measure(servers: object, load: Load, seconds: float, asked: Asked) -> Run:
        found = point(load, 1, (0.0, 1.0), [], None, 0.0)
        used = next(others) if load.loop == "closed" and asked.seed >= 0 else 0.0
        return Run(asked, found, Work(float(next(order)), 0.0, 0.0), used)

    monkeypatch.setattr(simulator_check, "measure", measure)
    monkeypatch.setattr(simulator_check, "summary", lambda *args: {})
    monkeypatch.setattr(Calibration, "take", take)
    options = Namespace(rounds=2, seconds=1.0, share=0.7, most_others=0.1)
    rounds = Rounds([], EngineConfig(), options)
    await rounds.measure(mix())
    done = rounds.done
    assert [closed.others for (closed, _), _ in done] == [0.05, 0.02]
    assert rounds.disturbed == 1
    seeds = {closed.asked.seed for (closed, _), _ in done}
    assert len(seeds) == 2, "a repeated prompt would be cached"
    for run, calibration in itertools.chain(*done):
        at = run.work.engines
        assert calibration.client_cpu == [at - 1, at + 1], "before the loop and after it"


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
