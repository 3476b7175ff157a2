"""The plan of states: slots within the bytes, and as many sequences as they hold."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.state import StatePart
from engine.memory.state_plan import StatePlan, default_budget, plan_states
from engine.scheduling.state_slots import least_slots

# 6 x 3 numbers in the model's dtype and 8 in fp32: 68 bytes in bf16.
SPECS = [(StatePart((6, 3)), StatePart((2, 4), torch.float32))]
SIZE = 6 * 3 * 2 + 8 * 4


def planned(budget: int, max_num_seqs: int = 8, most_snapshots: int = 100) -> StatePlan:
    config = EngineConfig(model="", max_num_seqs=max_num_seqs)
    return plan_states(SPECS, torch.bfloat16, config, most_snapshots=most_snapshots, budget=budget)


def test_plan_states_with_much_memory_keeps_a_snapshot_for_each_block() -> None:
    slots = least_slots(8) + 100
    plan = planned(10**9)
    assert plan == StatePlan(slots, SIZE, 8)
    assert plan.num_bytes == (slots + 1) * SIZE


@pytest.mark.parametrize("slots", [19, 20, 40, 53, 60, 100])
def test_plan_states_stays_within_its_bytes_and_serves_fewer_sequences(slots: int) -> None:
    plan = planned((slots + 1) * SIZE)
    assert plan.num_bytes <= (slots + 1) * SIZE
    assert plan.num_slots == slots
    assert least_slots(plan.max_num_seqs) <= slots
    assert 1 <= plan.max_num_seqs <= 8
    # Running sequences leave slots to snapshots, but for a single one.
    assert plan.max_num_seqs == 1 or least_slots(plan.max_num_seqs) <= 0.75 * slots
    assert plan.max_num_seqs == 8 or least_slots(plan.max_num_seqs + 1) > 0.75 * slots


def test_plan_states_too_little_memory_for_one_raises_with_the_bytes_that_suffice() -> None:
    least = (least_slots(1) + 1) * SIZE
    with pytest.raises(ConfigError, match=f"--state-memory-bytes {least}"):
        planned(least - 1)
    assert planned(least).max_num_seqs == 1


def test_plan_states_without_recurrent_layers_changes_nothing() -> None:
    config = EngineConfig(model="", max_num_seqs=5)
    plan = plan_states([], torch.bfloat16, config, most_snapshots=9, budget=0)
    assert plan.max_num_seqs == 5
    assert plan.num_bytes == 0


def test_default_budget_of_a_gpu_is_a_quarter_of_what_may_be_used() -> None:
    config = EngineConfig(model="", gpu_memory_utilization=0.8)
    assert default_budget(1000, 5, config) == 200
