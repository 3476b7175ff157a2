"""Agreements between ranks while they load a model. Each rank calls these functions in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.device.ranks import FLAG, Ranks
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.protocol.ready import MemoryEntry

Connect = Callable[[Ranks, torch.device], None]  # connects a rank with the others


def refuse_ranks(ranks: Ranks, device: torch.device) -> None:
    """Raise ConfigError: only `penstock serve` starts the processes of the other ranks."""
    raise ConfigError(f"{FLAG} {ranks.count} is not possible here, only with `penstock serve`.")


def least_of_ranks(plan: ModelPlan, *own: int) -> list[int]:
    """Return the least of all ranks' values of each number."""
    ranks = plan.ranks.numbers(own, plan.device)
    return [min(values) for values in zip(*ranks, strict=True)]


def sum_of_ranks(plan: ModelPlan, *own: int) -> list[int]:
    """Return the sum of all ranks' values of each number."""
    ranks = plan.ranks.numbers(own, plan.device)
    return [sum(values) for values in zip(*ranks, strict=True)]


def memory_of_others(
    plan: ModelPlan, own: tuple[MemoryEntry, ...]
) -> tuple[tuple[MemoryEntry, ...], ...]:
    """Return the memory tables of ranks 1, 2, ... They have the same entries as rank 0's."""
    unknown = -1
    planned = [entry.planned for entry in own]
    measured = [unknown if entry.measured is None else entry.measured for entry in own]
    tables = []
    ranks = plan.ranks.numbers([*planned, *measured], plan.device)
    for numbers in ranks[1:]:
        found = numbers[len(own) :]
        table = []
        for index, entry in enumerate(own):
            size = None
            if found[index] != unknown:
                size = found[index]
            table.append(MemoryEntry(entry.name, numbers[index], size))
        tables.append(tuple(table))
    return tuple(tables)
