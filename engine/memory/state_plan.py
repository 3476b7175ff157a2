"""The plan of the states of recurrent layers: how many slots, and for how many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.device.limits import is_memory_limited
from engine.errors import ConfigError
from engine.layers.state import StateSpec, state_bytes
from engine.scheduling.state_slots import least_slots

FLAG = "--state-memory-bytes"
SHARE_OF_GPU = 4  # of the part of a GPU's memory that may be used
# Of the slots, the part that running sequences may take. The others are snapshots.
MOST_RUNNING = 0.75


class StatePlan(NamedTuple):
    """The slots of a model's states; none if no layer is recurrent."""

    num_slots: int = 0
    slot_bytes: int = 0
    max_num_seqs: int = 0  # for which the slots suffice

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots, with slot 0."""
        return (self.num_slots + 1) * self.slot_bytes if self.num_slots else 0


def plan_states(
    specs: Sequence[StateSpec],
    dtype: torch.dtype,
    config: EngineConfig,
    *,
    most_snapshots: int,
    budget: int,
) -> StatePlan:
    """Return as many slots as `budget` bytes hold, with at most `most_snapshots` for block edges.

    If they are too few for --max-num-seqs sequences, fewer run at once. Raises ConfigError if they
    do not suffice for one.
    """
    if not specs:
        return StatePlan(max_num_seqs=config.max_num_seqs)
    size = state_bytes(specs, dtype)
    least_of_one = least_slots(1)
    wanted = least_slots(config.max_num_seqs) + most_snapshots
    slots = min(budget // size - 1, wanted)
    if slots < least_of_one:
        needed = (least_of_one + 1) * size
        raise ConfigError(
            f"The recurrent layers keep {size / 2**20:.1f} MiB a sequence, and need "
            f"{needed / 2**20:.0f} MiB at least, but have {budget / 2**20:.0f} MiB. Use "
            f"{FLAG} {needed} or more memory."
        )
    fitting = 1
    while fitting < config.max_num_seqs and least_slots(fitting + 1) <= slots * MOST_RUNNING:
        fitting += 1
    return StatePlan(slots, size, fitting)


def default_budget(total: int | None, share: int, config: EngineConfig) -> int:
    """Return the bytes for states if none are configured: the same on all ranks.

    `total` is the memory of a GPU, None for a CPU; then half of a container's `share` for caches,
    or that of a machine, counts.
    """
    if total is not None:
        return int(total * config.gpu_memory_utilization) // SHARE_OF_GPU
    return share // 2 if is_memory_limited() else share
