"""The scheduler under simulated random traffic, and each of its rules alone.

Replay a run with `TESTS_SEED=<seed> pytest tests/engine/scheduling -k random`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.errors import RequestRejectedError
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.ready import KVGroup
from tests.engine.scheduling.planted_bugs import PLANTED, Plant
from tests.engine.scheduling.simulation import VOCAB, Simulation, random_traffic
from tests.support.thorough import examples

SEEDS = (*range(240), 2474)  # the first 30 find each planted bug; the last one found a real one
MORE_SEEDS = range(240, 7000)


def run_seeds(seeds: Iterable[int]) -> list[Simulation]:
    """Run all seeds. Raises AssertionError with the command that replays the failed seed."""
    simulations = []
    for seed in seeds:
        try:
            simulations.append(random_traffic(seed))
        except Exception as error:
            raise AssertionError(
                f"Random traffic failed with {error!r}. Replay it with\n"
                f"TESTS_SEED={seed} pytest tests/engine/scheduling -k random"
            ) from error
    return simulations


def test_scheduler_random_traffic_gives_expected_outputs() -> None:
    if (seed := os.environ.get("TESTS_SEED")) is not None:
        run_seeds([int(seed)])
        return
    simulations = run_seeds(SEEDS)
    stats = [s.scheduler.stats() for s in simulations]
    # The traffic must exercise preemption, prefix hits and aborts to be a useful test.
    assert sum(s.preemptions > 0 for s in stats) > 24
    assert sum(s.prefix_hits > 0 for s in stats) > 72
    assert sum(bool(s.aborted) for s in simulations) > 72
    assert max(s.most_preemptions for s in simulations) <= 10


@pytest.mark.slow
def test_scheduler_more_random_traffic_gives_expected_outputs() -> None:
    run_seeds(MORE_SEEDS)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives the simulation with hypothesis, which shrinks failures to short examples."""

    @initialize(
        depth=st.integers(0, 2),
        block_size=st.integers(1, 3),
        num_blocks=st.integers(2, 8),
        max_num_seqs=st.integers(1, 4),
        budget=st.sampled_from((1, 3, 16)),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        depth: int,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        prefix_caching: bool,
    ) -> None:
        self.simulation = Simulation(
            depth=depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size + 1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefix_caching=prefix_caching,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(("", "tenant")),
        stops=st.sampled_from(((), (3,), tuple(range(VOCAB)))),
        min_tokens=st.integers(0, 3),
        fails_at=st.none() | st.integers(0, 3),
        prompt_logprobs=st.booleans(),
        tenant=st.sampled_from(("", "a", "b")),
    )
    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        self.simulation.add(prompt, max_tokens, **options)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.simulation.turn()

    @precondition(lambda self: self.simulation.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(*data.draw(st.sets(st.sampled_from(self.simulation.live))))

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
# Deterministic on every machine; a failure prints its steps as code.
TestSchedulerMachine.settings = settings(
    derandomize=True, max_examples=examples(300), stateful_step_count=30, deadline=None
)


def test_scheduler_preempted_requests_get_their_expected_answers() -> None:
    """64 blocks, and 200 requests that need up to 40 blocks each."""
    simulation = Simulation(
        depth=1,
        num_blocks=64,
        block_size=4,
        max_model_len=160,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )
    for number in range(200):
        length = 1 + (number * 37) % 80
        simulation.add([(number + i) % VOCAB for i in range(length)], max_tokens=length)
    simulation.drain()
    assert simulation.scheduler.stats().preemptions > 0
    assert simulation.most_preemptions <= 10


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.variants(8)
def test_planted_bug_is_found_and_replays(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        run_seeds(SEEDS)
    seed = str(found.value).split("TESTS_SEED=")[1].split(" pytest ")[0]
    monkeypatch.setenv("TESTS_SEED", seed)
    with pytest.raises(AssertionError) as replayed:
        test_scheduler_random_traffic_gives_expected_outputs()
    assert str(replayed.value) == str(found.value)


# ---- single rules ---------------------------------------------------------------------------


def small(**limits: float) -> Simulation:
    defaults: dict[str, float] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_model_len": 65,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    return Simulation(**defaults | limits)


def test_schedule_decodes_come_first_and_prompt_gets_remaining_budget() -> None:
    simulation = small(max_num_batched_tokens=6)
    simulation.add([1, 2], max_tokens=20)
    simulation.turn()
    simulation.add(list(range(14)), max_tokens=2)
    shapes = []
    for _ in range(3):
        step = simulation.scheduler.schedule()
        assert step
        shapes.append([(s.id, s.start, s.count, s.samples) for s in step.slices])
        simulation._retire(step)
    decodes = [[(1, position, 1, True)] for position in (2, 3, 4)]
    chunks = [[(2, 0, 5, False)], [(2, 5, 5, False)], [(2, 10, 4, True)]]
    assert shapes == [d + c for d, c in zip(decodes, chunks, strict=True)]


def test_schedule_chunk_of_higher_priority_leaves_decodes_their_tokens() -> None:
    """A long prompt must not stop the streams of other requests."""
    simulation = small(max_num_batched_tokens=6)
    ordinary = [simulation.add([n], max_tokens=20) for n in range(3)]
    simulation.turn()
    urgent = simulation.add(list(range(9)), max_tokens=2, priority=-1)
    simulation.turn()  # admitted after the running ones, with the remaining budget
    for count in (3, 3):
        step = simulation.scheduler.schedule()
        assert step
        assert [s.id for s in step.slices if s.count == 1] == ordinary
        assert [(s.id, s.count) for s in step.slices if s.count > 1] == [(urgent, count)]
        simulation._retire(step)


def test_schedule_chunks_in_steps_with_decodes_shrink_with_a_long_context() -> None:
    """So that steps take about the same time, and the gaps of streams stay even."""
    limits = {"num_blocks": 200, "max_model_len": 400, "max_num_batched_tokens": 65}
    simulation = small(**limits, context_cost=1 / 64)
    simulation.add([1, 2], max_tokens=50)
    simulation.turn()
    simulation.add(list(range(300)), max_tokens=2)
    counts = [max(count for _, count in step) for step in shapes(simulation, 8)]
    assert counts == [64, 64, 43, 35, 30, 27, 25, 12]


def test_schedule_chunks_without_decodes_use_the_whole_budget() -> None:
    limits = {"num_blocks": 200, "max_model_len": 400, "max_num_batched_tokens": 64}
    simulation = small(**limits, context_cost=1 / 64)
    simulation.add(list(range(300)), max_tokens=2)
    assert [step[0][1] for step in shapes(simulation, 5)] == [64, 64, 64, 64, 44]


def steps_to_the_first_token(simulation: Simulation, *ids: int) -> list[int]:
    """Return the number of steps from now until each of these requests has a token."""
    steps: dict[int, int] = {}
    for number in itertools.count(1):
        simulation.turn()
        for id_ in ids:
            if simulation.outputs[id_]:
                steps.setdefault(id_, number)
        if len(steps) == len(ids):
            return [steps[id_] for id_ in ids]
    raise AssertionError


@pytest.mark.parametrize("longs", [1, 4])
@pytest.mark.parametrize("length", [8, 64, 160])
def test_schedule_long_prompts_do_not_starve_short_ones_behind(length: int, longs: int) -> None:
    """Ten tenants send short prompts while another tenant sends long ones."""
    limits = {"num_blocks": 1200, "block_size": 16, "max_model_len": 4001, "max_num_seqs": 16}
    simulation = small(**limits, max_num_batched_tokens=64, prefix_caching=False)
    short = [simulation.add([n] * length, 1) for n in range(10)]
    alone = max(steps_to_the_first_token(simulation, *short))
    long = [simulation.add([1] * (3600 + n * 100), 1) for n in range(longs)]
    simulation.turn()
    short = [simulation.add([n] * length, 1) for n in range(10)]
    *behind, end = steps_to_the_first_token(simulation, *short, long[0])
    assert max(behind) <= 2 * alone + longs
    assert end <= 3600 / 64 + max(behind)


def shapes(simulation: Simulation, steps: int) -> list[list[tuple[int, int]]]:
    """Return (request id, number of tokens) of each slice of the next steps."""
    found = []
    for _ in range(steps):
        step = simulation.scheduler.schedule()
        assert step
        found.append(sorted((s.id, s.count) for s in step.slices))
        simulation._retire(step)
    return found


def test_schedule_short_prompts_below_half_budget_run_with_long_prompt() -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    long = simulation.add([1] * 100, 1)
    simulation.turn()
    short = [simulation.add([n] * 4, 20) for n in (2, 3)]
    first, then = shapes(simulation, 2)
    assert first == [(long, 8), *((id_, 4) for id_ in short)]
    assert then == [(long, 14), *((id_, 1) for id_ in short)]  # one token is reserved per decode


def test_schedule_shorter_prompts_above_half_budget_alternate_steps() -> None:
    """A prompt between them in rank gets a share too, or the shorter prompt would be blocked."""
    simulation = small(num_blocks=300, max_model_len=500)
    long = simulation.add([1] * 116, 1)
    simulation.turn()
    middle, short = simulation.add([2] * 120, 1), simulation.add([3] * 20, 1)
    assert shapes(simulation, 9) == [
        [(long, 16)],
        [(long, 1), (middle, 1), (short, 14)],
        [(long, 16)],
        [(long, 1), (middle, 9), (short, 6)],
        *[[(long, 16)]] * 4,
        [(long, 2), (middle, 14)],
    ]


def test_schedule_prompts_that_fit_a_step_are_not_begun_together() -> None:
    """Under overload, admitted prompts must not share each step: all first tokens would be late."""
    simulation = small(num_blocks=600, max_num_seqs=64, prefix_caching=False)
    for length in [15, 14, 13, 12, 11, 10, 9] * 8:
        simulation.add([length] * length, 1)
    for _ in range(30):
        simulation.turn()
        begun = [s for s in simulation.scheduler.running if 0 < s.num_computed < s.prompt_length]
        assert len(begun) <= 2


def test_schedule_cached_prompt_needs_no_share_of_the_budget() -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    simulation.add([1] * 60, 1)
    simulation.drain()
    long = simulation.add([2] * 100, 1)
    simulation.turn()
    known = simulation.add([1] * 62, 1)
    assert shapes(simulation, 1) == [[(long, 14), (known, 2)]]


def test_schedule_prompts_of_equal_length_run_in_arrival_order() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    ids = [simulation.add([n] * 160, 1) for n in range(4)]
    assert steps_to_the_first_token(simulation, *ids) == [10, 20, 30, 40]


def test_schedule_higher_priority_prompt_overtakes_a_running_prompt() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    late = simulation.add([1] * 320, 1)
    simulation.turn()
    urgent = simulation.add([2] * 150, 1, priority=-1)  # also shorter, which must not matter
    longer = simulation.add([3] * 300, 1, priority=-1)
    cheap = simulation.add([4], 1, priority=1)
    steps = steps_to_the_first_token(simulation, urgent, longer, late, cheap)
    assert steps == sorted(steps)
    assert steps[0] == 10  # the running prompt keeps one token per step


def test_schedule_prompt_without_blocks_gets_no_share_of_the_budget() -> None:
    simulation = small(num_blocks=100, max_model_len=400, prefix_caching=False)
    first = simulation.add([1] * 320, 1)
    simulation.turn()
    waits = simulation.add([2] * 100, 1)
    assert steps_to_the_first_token(simulation, first, waits)[0] <= 20  # it is tried once


def test_schedule_prompt_without_a_row_gets_no_share_of_the_budget() -> None:
    simulation = small(num_blocks=200, max_model_len=400, max_num_seqs=1)
    ids = simulation.add([1] * 320, 1), simulation.add([2] * 100, 1)
    assert steps_to_the_first_token(simulation, *ids) == [20, 27]


def test_schedule_prompt_sharing_prefix_of_running_prompt_waits() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    long = simulation.add([1] * 160 + [2] * 90, 1)
    simulation.turn()
    like = [simulation.add([1] * 160 + [3 + n], 1) for n in range(3)]
    end, *waits = steps_to_the_first_token(simulation, long, *like)
    assert [simulation.admitted[id_] for id_ in like] == [160] * 3
    assert end == 15  # they get no share of the budget meanwhile
    assert max(waits) < end


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_schedule_prompt_waiting_for_prefix_takes_no_share_of_others(turns: int) -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    simulation.add([1] * 160, 1)
    for _ in range(turns):
        simulation.turn()
    simulation.add([2] * 120, 1)
    like = simulation.add([1] * 80 + [3], 1)
    simulation.drain()
    assert simulation.admitted[like] == 80


def test_schedule_prompt_of_other_tenant_does_not_wait_for_prefix() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    long = simulation.add([1] * 250, 1)
    simulation.turn()
    tenant = simulation.add([1] * 160, 1, salt="tenant")
    end, wait = steps_to_the_first_token(simulation, long, tenant)
    assert wait < end


@pytest.mark.parametrize(
    ("prompt", "cached", "steps"),
    [([1] * 16 + [2] * 5, 16, 1), ([1] * 20, 16, 1), ([5] + [1] * 30, 0, 5)],
)
def test_schedule_prompt_with_no_more_common_prefix_does_not_wait(
    prompt: list[int], cached: int, steps: int
) -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    simulation.add([1] * 400, 1)
    simulation.turn()
    short = simulation.add(prompt, 1)
    assert steps_to_the_first_token(simulation, short) == [steps]
    assert simulation.admitted[short] == cached


def test_step_prefills_lists_all_prompt_chunks() -> None:
    simulation = small(max_num_batched_tokens=6)
    simulation.add([1] * 13, max_tokens=3)
    chunks = []
    while step := simulation.scheduler.schedule():
        chunks.append([(p.id, p.start, p.count) for p in step.prefills])
        simulation._retire(step)
    # A chunk of only the last prompt token counts too, although it looks like a decode.
    assert chunks == [[(1, 0, 6)], [(1, 6, 6)], [(1, 12, 1)], [], []]


def test_step_prefills_includes_recomputation_after_preemption() -> None:
    simulation = small(num_blocks=4, max_model_len=17, prefix_caching=False)
    simulation.add([1] * 4, 9, priority=-1)
    ordinary = simulation.add([2] * 4, 9)
    chunks = []
    while step := simulation.scheduler.schedule():
        chunks += [(p.start, p.count) for p in step.prefills if p.id == ordinary]
        simulation._retire(step)
    assert chunks[0] == (0, 4)
    assert chunks[1][0] == 0
    assert chunks[1][1] > 4


def test_admission_order_is_priority_then_arrival() -> None:
    simulation = small(max_num_seqs=1)
    ids = [simulation.add([1], 1, priority=p) for p in (0, 5, 0, -3)]
    simulation.drain()
    assert list(simulation.admitted) == [ids[3], ids[0], ids[2], ids[1]]


def test_admission_smaller_request_does_not_overtake_the_queue_head() -> None:
    simulation = small(num_blocks=4, max_model_len=17)
    simulation.add([1] * 8, 4)
    simulation.turn()
    big, tiny = simulation.add([2] * 10, 2), simulation.add([3], 1)
    simulation.turn()
    assert list(simulation.admitted) == [1]
    simulation.drain()
    assert list(simulation.admitted) == [1, big, tiny]


def test_admission_leaves_a_spare_block_for_running_sequences() -> None:
    """Without the watermark the new sequence would be preempted in the next step."""
    simulation = small(num_blocks=3, max_model_len=13)
    simulation.add([1] * 3, 6)
    simulation.turn()
    assert simulation.scheduler.pool.num_available == 2
    simulation.add([2] * 8, 1)
    simulation.turn()
    assert list(simulation.admitted) == [1]
    simulation.drain()
    assert simulation.scheduler.stats().preemptions == 0


def test_preemption_takes_the_lowest_rank_and_keeps_its_tokens() -> None:
    simulation = small(num_blocks=4, max_model_len=17, prefix_caching=False)
    important = simulation.add([1] * 4, 9, priority=-1)
    ordinary = simulation.add([2] * 4, 9)
    while not simulation.scheduler.stats().preemptions:
        simulation.turn()
    assert [s.id for s in simulation.scheduler.running] == [important]
    assert [s.id for s in simulation.scheduler.waiting] == [ordinary]
    kept = len(simulation.outputs[ordinary])
    assert simulation.scheduler.sequences[ordinary].num_outputs == kept > 0
    simulation.drain()
    assert list(simulation.admitted) == [important, ordinary]  # reported once each


def test_schedule_step_with_preemption_admits_no_sequence() -> None:
    simulation = small(num_blocks=5, max_model_len=21)
    simulation.add([1] * 4, 9)
    simulation.add([2] * 9, 9)
    simulation.turn()
    waits = simulation.add([3] * 3, 1, priority=-1)
    while not simulation.scheduler.stats().preemptions:
        assert waits not in simulation.admitted
        simulation.turn()
    assert waits not in simulation.admitted
    simulation.turn()
    assert waits in simulation.admitted
    simulation.drain()


def test_add_request_that_can_never_run_is_refused_with_the_limits() -> None:
    scheduler = small(num_blocks=4, max_model_len=100).scheduler
    for prompt, max_tokens, code, number in (
        (90, 11, "context_length_exceeded", "100"),
        (10, 8, "context_length_exceeded", "5 KV blocks of 4"),
        (0, 5, "invalid_value", "0"),
        (5, 0, "invalid_value", "0"),
    ):
        request = GenerateRequest(1, [1] * prompt, SamplingParams(max_tokens), 0.0)
        with pytest.raises(RequestRejectedError, match=number) as refused:
            scheduler.add(request)
        assert refused.value.code == code
    assert not scheduler.has_work
    for source, groups in (
        ([1], [KVGroup(1)]),
        ([], [KVGroup(1), KVGroup(1, is_cross=True)]),
        ([], []),
    ):
        scheduler = small(groups=groups).scheduler
        request = GenerateRequest(1, [1], SamplingParams(2), 0.0, encoder_prompt=source)
        with pytest.raises(RequestRejectedError, match="cannot run this request"):
            scheduler.add(request)
    simulation = small(num_blocks=4, max_model_len=100)
    assert simulation.add([1] * 10, 7)  # 17 tokens, but the last one's KV is never needed
    simulation.drain()


def test_prefix_cache_hits_running_and_finished_prompts() -> None:
    simulation = small()
    prompt = list(range(11))
    first, second = simulation.add(prompt, 3), simulation.add(prompt, 3)
    simulation.drain()
    third = simulation.add(prompt, 3)
    salted = simulation.add(prompt, 3, salt="tenant")
    whole = simulation.add(prompt[:8], 3)  # the last block is computed for its logits
    simulation.drain()
    assert simulation.admitted == {first: 0, second: 8, third: 8, salted: 0, whole: 4}
    stats = simulation.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * 11 + 8, 8 + 8 + 4)


def test_prefix_cache_copies_the_beginning_of_a_block() -> None:
    simulation = small(block_size=8, part_size=2)
    stem = list(range(13))
    simulation.add([*stem, 50, 51, 52, 53], 3)  # its second block ends behind 52
    simulation.drain()
    for own, cached in (([60], 12), ([61, 62, 63], 12), ([50, 51, 60], 14), ([50, 51, 52, 60], 16)):
        request = simulation.add([*stem, *own], 3)
        simulation.drain()  # the device checks that the copied KV is right
        assert request
        assert simulation.admitted[request] == cached
    foreign = simulation.add([*stem, 60], 3, salt="tenant")
    simulation.drain()
    assert foreign
    assert simulation.admitted[foreign] == 0


def test_prefix_cache_copies_nothing_that_the_same_step_computes() -> None:
    simulation = small(block_size=8, part_size=2, max_num_batched_tokens=64)
    first = simulation.add(list(range(20)), 3)
    other = simulation.add([*range(12), 50, 51], 3)
    simulation.turn()
    assert first
    assert other
    assert (simulation.admitted[first], simulation.admitted[other]) == (0, 8)
    simulation.drain()


def test_prompt_logprobs_compute_a_cached_prompt_in_full() -> None:
    simulation = small()
    prompt = list(range(11))
    first = simulation.add(prompt, 3, prompt_logprobs=True)
    simulation.drain()
    again, plain = simulation.add(prompt, 3, prompt_logprobs=True), simulation.add(prompt, 3)
    simulation.drain()
    assert simulation.admitted == {first: 0, again: 0, plain: 8}


def test_prompt_logprobs_after_preemption_resume_at_the_last_known() -> None:
    simulation = small(num_blocks=8, max_num_batched_tokens=8)
    simulation.add(list(range(10)) * 2, 3, prompt_logprobs=True)
    simulation.turn()
    (sequence,) = simulation.scheduler.running
    simulation.scheduler._preempt(sequence)
    simulation.turn()
    # The first 8 tokens are cached, and their logits gave the prompt logprobs up to token 9.
    assert (sequence.num_matched, sequence.num_computed) == (2, 16)
    simulation.drain()


def test_prefix_cache_disabled_keeps_no_blocks() -> None:
    simulation = small(prefix_caching=False)
    simulation.add(list(range(11)), 3)
    simulation.add(list(range(11)), 3)
    simulation.drain()
    assert set(simulation.admitted.values()) == {0}
    assert simulation.scheduler.stats().blocks_cached == 0


def test_prefix_cache_forgets_blocks_of_failed_sequence() -> None:
    simulation = small()
    simulation.add(list(range(11)), 8, fails_at=2)
    simulation.drain()
    assert simulation.scheduler.stats().blocks_cached == 0
    again = simulation.add(list(range(11)), 1)
    simulation.drain()
    assert simulation.admitted[again] == 0


def test_prefix_cache_forgets_shared_blocks_written_by_failed_sequence() -> None:
    simulation = small(max_num_batched_tokens=12)
    prompt = list(range(11))
    simulation.add(prompt, 8, fails_at=1)
    simulation.turn()
    sharer = simulation.add([*prompt[:8], *range(20)], 2)  # reuses its blocks, still in chunks
    simulation.turn()
    assert simulation.admitted[sharer] == 8
    assert simulation.scheduler.sequences.keys() == {sharer}, "the other sequence has failed"
    again = simulation.add(prompt, 1)
    simulation.turn()
    assert simulation.admitted[again] == 0
    simulation.abort(sharer)
    simulation.drain()


def test_step_scrub_lists_exactly_the_newly_allocated_blocks() -> None:
    simulation = small(num_blocks=4, max_model_len=17)
    for prompt, scrubbed in ([1] * 9, 3), ([1] * 9, 1), ([2] * 16, 4), ([2] * 16, 1):
        simulation.add(prompt, 1)
        step = simulation.scheduler.schedule()
        assert step
        assert len(set(step.scrub)) == scrubbed
        simulation._retire(step)


def test_prefix_cache_keeps_blocks_that_failed_sequence_only_read() -> None:
    simulation = small(depth=1)
    prompt = list(range(9))
    healthy = simulation.add(prompt, 12)
    simulation.turn()
    simulation.add(prompt, 8, fails_at=1)
    simulation.drain()  # the device checks every read of the healthy sequence
    assert simulation.outputs[healthy] == simulation.expected[healthy]
    again = simulation.add(prompt, 1)
    simulation.drain()
    assert simulation.admitted[again] == 8
