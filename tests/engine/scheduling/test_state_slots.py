"""Which states are kept: at every edge while slots are plentiful, and the ends of conversations."""

from __future__ import annotations

from engine.scheduling.state_slots import StateSlots, least_slots
from tests.engine.scheduling.simulation import Simulation

BLOCK = 4


def small(slots: int, max_num_seqs: int = 2, budget: int = 16) -> Simulation:
    states = StateSlots(slots, max_num_seqs, BLOCK, keeps_edges=True)
    return Simulation(
        num_blocks=400,
        block_size=BLOCK,
        max_model_len=400,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        states=states,
    )


def hit(simulation: Simulation, prompt: list[int]) -> int:
    """Run a request; return how many of its tokens were in the prefix cache."""
    request = simulation.add(prompt, 1)
    assert request is not None
    simulation.drain()
    return simulation.admitted[request]


def text(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i + seed * i) % 11 for i in range(length)]


def test_every_edge_of_a_prompt_is_found_while_slots_are_plentiful() -> None:
    simulation = small(least_slots(2) + 60)
    prompt = text(1, 41)
    assert hit(simulation, prompt) == 0
    for shared in range(1, 41):
        other = [*prompt[:shared], (prompt[shared] + 1) % 11, 5]
        assert hit(simulation, other) == shared // BLOCK * BLOCK


def test_with_few_slots_the_newest_edge_is_found() -> None:
    simulation = small(least_slots(2))
    prompt = text(2, 41)
    assert hit(simulation, prompt) == 0
    assert hit(simulation, [*prompt, 3, 3]) == 40


def test_a_long_prompt_does_not_evict_the_ends_of_conversations() -> None:
    simulation = small(least_slots(2) + 12)
    conversations = [text(seed, 9) for seed in range(3, 11)]
    for prompt in conversations:
        hit(simulation, prompt)
    hit(simulation, text(99, 300))
    assert [hit(simulation, [*prompt, 1, 2]) for prompt in conversations] == [8] * 8


def test_a_snapshot_that_was_used_outlives_those_that_were_passed() -> None:
    simulation = small(least_slots(2) + 12)
    system = text(12, 9)
    hit(simulation, [*system, *text(13, 20)])  # the edge behind `system` is passed
    assert hit(simulation, [*system, *text(14, 20)]) == 8
    hit(simulation, text(98, 300))
    assert hit(simulation, [*system, *text(15, 20)]) == 8


def test_gauges_count_held_slots_and_snapshots() -> None:
    simulation = small(least_slots(2) + 60)
    states = simulation.scheduler.tables.states
    assert isinstance(states, StateSlots)
    simulation.add(text(5, 10), 9)
    simulation.turn()
    assert states.gauges()["state_slots_held"] == 3  # two edges, and behind the last token
    simulation.drain()
    found = states.gauges()
    assert found["state_slots_held"] == 0
    assert found["state_slots_cached"] == 4  # 18 tokens are computed
