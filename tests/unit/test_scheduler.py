"""Scheduler under random traffic: the simulation of reliability T-44, and its rules one by one.

Every run replays: `PENSTOCK_TEST_SEED=<seed> pytest tests/unit/test_scheduler.py -k random`.
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
from engine.protocol import GenerateRequest, KVGroup, SamplingParams
from tests.unit.planted_bugs import PLANTED, Plant
from tests.unit.simulation import VOCAB, Simulation, random_traffic

SEEDS = range(2000)  # each planted bug is found by the 30th
MORE_SEEDS = range(2000, 7000)


def run_seeds(seeds: Iterable[int]) -> list[Simulation]:
    """All of them, or AssertionError with the command that replays the one that failed."""
    simulations = []
    for seed in seeds:
        try:
            simulations.append(random_traffic(seed))
        except Exception as error:
            raise AssertionError(
                f"Random traffic failed with {error!r}. Replay it with\n"
                f"PENSTOCK_TEST_SEED={seed} pytest tests/unit/test_scheduler.py -k random"
            ) from error
    return simulations


def test_random_traffic() -> None:
    if (seed := os.environ.get("PENSTOCK_TEST_SEED")) is not None:
        run_seeds([int(seed)])
        return
    simulations = run_seeds(SEEDS)
    stats = [s.scheduler.stats() for s in simulations]
    # The traffic is worth something only if it gets into every corner.
    assert sum(s.preemptions > 0 for s in stats) > 200
    assert sum(s.prefix_hits > 0 for s in stats) > 600
    assert sum(bool(s.aborted) for s in simulations) > 600
    assert max(s.most_preemptions for s in simulations) <= 10


@pytest.mark.slow
def test_more_random_traffic() -> None:
    run_seeds(MORE_SEEDS)


class SchedulerMachine(RuleBasedStateMachine):
    """The same simulation, steered by hypothesis, which shrinks what it finds."""

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
        scores=st.booleans(),
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
# The same sequences on every machine; a failure prints its steps, ready to paste.
TestSchedulerMachine.settings = settings(
    derandomize=True, max_examples=300, stateful_step_count=30, deadline=None
)


def test_pressure_ends_with_the_answers_of_the_unpressured_run() -> None:
    """Reliability T-16: 64 blocks, 200 requests that need up to 40 of them."""
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
def test_a_planted_bug_is_found_and_replays(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        run_seeds(SEEDS)
    seed = str(found.value).split("PENSTOCK_TEST_SEED=")[1].split(" pytest ")[0]
    monkeypatch.setenv("PENSTOCK_TEST_SEED", seed)
    with pytest.raises(AssertionError) as replayed:
        test_random_traffic()
    assert str(replayed.value) == str(found.value)


# ---- the rules, one by one ------------------------------------------------------------------


def small(**limits: int | bool) -> Simulation:
    defaults: dict[str, int | bool] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_model_len": 65,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    return Simulation(**defaults | limits)


def test_decodes_come_first_and_a_prompt_gets_what_the_budget_leaves() -> None:
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


def test_a_chunk_of_better_priority_leaves_the_others_their_tokens() -> None:
    """One long prompt cannot freeze the streams of others."""
    simulation = small(max_num_batched_tokens=6)
    ordinary = [simulation.add([n], max_tokens=20) for n in range(3)]
    simulation.turn()
    urgent = simulation.add(list(range(9)), max_tokens=2, priority=-1)
    simulation.turn()  # admitted behind those that run, with what these leave
    for count in (3, 3):
        step = simulation.scheduler.schedule()
        assert step
        assert [s.id for s in step.slices if s.count == 1] == ordinary
        assert [(s.id, s.count) for s in step.slices if s.count > 1] == [(urgent, count)]
        simulation._retire(step)


def steps_to_the_first_token(simulation: Simulation, *ids: int) -> list[int]:
    """How many steps from now until each of these has a token, in order."""
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
def test_long_prompts_do_not_shut_out_the_short_ones_behind_them(length: int, longs: int) -> None:
    """Reliability T-19: ten tenants with short prompts beside one with long ones."""
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
    """Who has how many tokens of each of the next steps."""
    found = []
    for _ in range(steps):
        step = simulation.scheduler.schedule()
        assert step
        found.append(sorted((s.id, s.count) for s in step.slices))
        simulation._retire(step)
    return found


def test_what_is_little_is_computed_beside_a_long_prompt() -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    long = simulation.add([1] * 100, 1)
    simulation.turn()
    short = [simulation.add([n] * 4, 20) for n in (2, 3)]
    first, then = shapes(simulation, 2)
    assert first == [(long, 8), *((id_, 4) for id_ in short)]
    assert then == [(long, 14), *((id_, 1) for id_ in short)]  # decodes are set aside once


def test_what_is_more_has_every_second_step() -> None:
    """Whoever stands before it has its share, too, or it would stand in the way."""
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


def test_what_the_cache_has_needs_no_room() -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    simulation.add([1] * 60, 1)
    simulation.drain()
    long = simulation.add([2] * 100, 1)
    simulation.turn()
    known = simulation.add([1] * 62, 1)
    assert shapes(simulation, 1) == [[(long, 14), (known, 2)]]


def test_among_equals_the_first_goes_first() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    ids = [simulation.add([n] * 160, 1) for n in range(4)]
    assert steps_to_the_first_token(simulation, *ids) == [10, 20, 30, 40]


def test_a_prompt_of_better_priority_goes_before_one_that_is_being_computed() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    late = simulation.add([1] * 320, 1)
    simulation.turn()
    urgent = simulation.add([2] * 150, 1, priority=-1)  # shorter, but that is not why
    longer = simulation.add([3] * 300, 1, priority=-1)
    cheap = simulation.add([4], 1, priority=1)
    steps = steps_to_the_first_token(simulation, urgent, longer, late, cheap)
    assert steps == sorted(steps)
    assert steps[0] == 10  # one token a step is what the other keeps


def test_nothing_is_left_to_a_prompt_for_which_there_are_no_blocks() -> None:
    simulation = small(num_blocks=100, max_model_len=400, prefix_caching=False)
    first = simulation.add([1] * 320, 1)
    simulation.turn()
    waits = simulation.add([2] * 100, 1)
    assert steps_to_the_first_token(simulation, first, waits)[0] <= 20  # it is asked about once


def test_nothing_is_left_to_a_prompt_for_which_there_is_no_row() -> None:
    simulation = small(num_blocks=200, max_model_len=400, max_num_seqs=1)
    ids = simulation.add([1] * 320, 1), simulation.add([2] * 100, 1)
    assert steps_to_the_first_token(simulation, *ids) == [20, 27]


def test_who_begins_like_a_long_prompt_waits_for_what_it_computes() -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    long = simulation.add([1] * 160 + [2] * 90, 1)
    simulation.turn()
    like = [simulation.add([1] * 160 + [3 + n], 1) for n in range(3)]
    end, *waits = steps_to_the_first_token(simulation, long, *like)
    assert [simulation.admitted[id_] for id_ in like] == [160] * 3
    assert end == 15  # and nothing is left to them meanwhile
    assert max(waits) < end


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_nor_does_it_take_what_another_leaves(turns: int) -> None:
    simulation = small(num_blocks=300, max_model_len=500)
    simulation.add([1] * 160, 1)
    for _ in range(turns):
        simulation.turn()
    simulation.add([2] * 120, 1)
    like = simulation.add([1] * 80 + [3], 1)
    simulation.drain()
    assert simulation.admitted[like] == 80


def test_another_tenant_does_not_wait_for_what_it_may_not_share() -> None:
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
def test_who_has_nothing_more_to_share_does_not_wait(
    prompt: list[int], cached: int, steps: int
) -> None:
    simulation = small(num_blocks=200, max_model_len=500)
    simulation.add([1] * 400, 1)
    simulation.turn()
    short = simulation.add(prompt, 1)
    assert steps_to_the_first_token(simulation, short) == [steps]
    assert simulation.admitted[short] == cached


def test_a_step_tells_which_prompts_it_computes() -> None:
    simulation = small(max_num_batched_tokens=6)
    simulation.add([1] * 13, max_tokens=3)
    chunks = []
    while step := simulation.scheduler.schedule():
        chunks.append([(p.id, p.start, p.count) for p in step.prefills])
        simulation._retire(step)
    # The last token of a prompt alone is a chunk, too, though it looks like a decode.
    assert chunks == [[(1, 0, 6)], [(1, 6, 6)], [(1, 12, 1)], [], []]


def test_what_is_computed_again_after_a_preemption_counts_as_prefill() -> None:
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


def test_waiting_ones_are_served_by_priority_then_by_arrival() -> None:
    simulation = small(max_num_seqs=1)
    ids = [simulation.add([1], 1, priority=p) for p in (0, 5, 0, -3)]
    simulation.drain()
    assert list(simulation.admitted) == [ids[3], ids[0], ids[2], ids[1]]


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_one() -> None:
    simulation = small(num_blocks=4, max_model_len=17)
    simulation.add([1] * 8, 4)
    simulation.turn()
    big, tiny = simulation.add([2] * 10, 2), simulation.add([3], 1)
    simulation.turn()
    assert list(simulation.admitted) == [1]
    simulation.drain()
    assert list(simulation.admitted) == [1, big, tiny]


def test_admission_leaves_a_spare_block_for_those_that_run() -> None:
    """Without the watermark the newcomer would be preempted by the very next step."""
    simulation = small(num_blocks=3, max_model_len=13)
    simulation.add([1] * 3, 6)
    simulation.turn()
    assert simulation.scheduler.pool.num_available == 2
    simulation.add([2] * 8, 1)
    simulation.turn()
    assert list(simulation.admitted) == [1]
    simulation.drain()
    assert simulation.scheduler.stats().preemptions == 0


def test_the_last_in_rank_is_preempted_and_comes_back_with_its_tokens() -> None:
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
    assert list(simulation.admitted) == [important, ordinary]  # once each


def test_a_step_that_preempts_admits_nobody() -> None:
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


def test_what_never_fits_is_refused_with_the_numbers() -> None:
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
        ([], [KVGroup(1), KVGroup(1, cross=True)]),
        ([], []),
    ):
        scheduler = small(groups=groups).scheduler
        request = GenerateRequest(1, [1], SamplingParams(2), 0.0, source=source)
        with pytest.raises(RequestRejectedError, match="not what the model"):
            scheduler.add(request)
    simulation = small(num_blocks=4, max_model_len=100)
    assert simulation.add([1] * 10, 7)  # 17 tokens, but the last one's KV is never needed
    simulation.drain()


def test_a_prefix_is_found_while_it_is_held_and_after_the_end() -> None:
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


def test_a_prompt_to_be_scored_is_computed_though_it_is_known() -> None:
    simulation = small()
    prompt = list(range(11))
    first = simulation.add(prompt, 3, scores=True)
    simulation.drain()
    again, plain = simulation.add(prompt, 3, scores=True), simulation.add(prompt, 3)
    simulation.drain()
    assert simulation.admitted == {first: 0, again: 0, plain: 8}


def test_a_preempted_prompt_is_computed_again_from_its_last_score() -> None:
    simulation = small(num_blocks=8, max_num_batched_tokens=8)
    simulation.add(list(range(10)) * 2, 3, scores=True)
    simulation.turn()
    (sequence,) = simulation.scheduler.running
    simulation.scheduler._preempt(sequence)
    simulation.turn()
    # Of 8 tokens there is KV and a score; the last of these is of the ninth.
    assert (sequence.num_matched, sequence.num_computed) == (2, 16)
    simulation.drain()


def test_without_prefix_caching_nothing_is_kept() -> None:
    simulation = small(prefix_caching=False)
    simulation.add(list(range(11)), 3)
    simulation.add(list(range(11)), 3)
    simulation.drain()
    assert set(simulation.admitted.values()) == {0}
    assert simulation.scheduler.stats().blocks_cached == 0


def test_the_content_of_a_failed_sequence_is_forgotten() -> None:
    simulation = small()
    simulation.add(list(range(11)), 8, fails_at=2)
    simulation.drain()
    assert simulation.scheduler.stats().blocks_cached == 0
    again = simulation.add(list(range(11)), 1)
    simulation.drain()
    assert simulation.admitted[again] == 0


def test_what_a_failed_sequence_has_written_is_forgotten_though_others_share_it() -> None:
    simulation = small(max_num_batched_tokens=12)
    prompt = list(range(11))
    simulation.add(prompt, 8, fails_at=1)
    simulation.turn()
    sharer = simulation.add([*prompt[:8], *range(20)], 2)  # finds its blocks, and is still a chunk
    simulation.turn()
    assert simulation.admitted[sharer] == 8
    assert simulation.scheduler.sequences.keys() == {sharer}, "the other has failed meanwhile"
    again = simulation.add(prompt, 1)
    simulation.turn()
    assert simulation.admitted[again] == 0
    simulation.abort(sharer)
    simulation.drain()


def test_every_block_just_allocated_is_scrubbed_and_no_other() -> None:
    simulation = small(num_blocks=4, max_model_len=17)
    for prompt, scrubbed in ([1] * 9, 3), ([1] * 9, 1), ([2] * 16, 4), ([2] * 16, 1):
        simulation.add(prompt, 1)
        step = simulation.scheduler.schedule()
        assert step
        assert len(set(step.scrub)) == scrubbed
        simulation._retire(step)


def test_shared_blocks_of_a_failed_sequence_stay_with_the_others() -> None:
    simulation = small(depth=1)
    prompt = list(range(9))
    healthy = simulation.add(prompt, 12)
    simulation.turn()
    simulation.add(prompt, 8, fails_at=1)
    simulation.drain()  # the device checks every read of the healthy one
    assert simulation.outputs[healthy] == simulation.expected[healthy]
    again = simulation.add(prompt, 1)
    simulation.drain()
    assert simulation.admitted[again] == 8
