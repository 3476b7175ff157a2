"""Print the memory that serving a model takes: `penstock serve MODEL --plan`.

`main` reads its arguments from the command line: the EngineConfig as JSON, and optionally
`anywhere`, or `bytes` and a number of bytes. Nothing is loaded: shapes come from config.json. The
status is 2, with the reason on stderr, if the model is not supported or does not fit; with
`anywhere`, memory is not checked. With `bytes`, the plan is that of a machine with so much free
memory (0: with what is free now), and PlannedBytes is printed as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from engine.config import EngineConfig
from engine.device.facts import total_memory
from engine.errors import ConfigError
from engine.kernels.triton.chips import PLAIN, force
from engine.memory.image_plan import MOST_READ, MOST_WAITING
from engine.memory.model_plan import ModelPlan
from engine.memory.report import (
    DRAFT_KV_CACHE,
    IMAGES,
    KV_CACHE,
    MARGIN,
    STATES,
    MemoryPlan,
    plan_memory,
    planned_bytes,
)


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    wanted = sys.argv[2:]
    if config.kernels == "plain":
        force(PLAIN)
    try:
        plan = ModelPlan(config)
        if wanted[:1] == ["bytes"]:
            sys.stdout.write(msgspec.json.encode(_planned(plan, int(wanted[1]))).decode())
        elif wanted != ["anywhere"]:
            others = [ModelPlan(config, rank) for rank in range(1, plan.ranks.count)]
            _print(_with_equal_caches([plan, *others]))
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    return 0


class PlannedBytes(NamedTuple):
    """Bytes that serving takes in all, of its KV cache, and of the GPU (None on a CPU)."""

    total: int
    kv_cache: int
    capacity: int | None


def _planned(plan: ModelPlan, available: int) -> PlannedBytes:
    memory = plan_memory(plan, available or None)
    total = sum(memory.planned.values()) - memory.planned.get(MARGIN, 0)
    kv_cache = memory.num_blocks * plan.block_bytes if plan.kv_groups else 0
    return PlannedBytes(total * plan.ranks.count, kv_cache, total_memory(plan.device))


class RankPlan(NamedTuple):
    """The plan of one of the ranks. A model in a single process has one."""

    plan: ModelPlan
    memory: MemoryPlan


def _with_equal_caches(plans: Sequence[ModelPlan]) -> list[RankPlan]:
    """Plan the memory of each rank: all have as many KV blocks as the one with the least room."""
    memories = [plan_memory(plan) for plan in plans]
    blocks = min(memory.num_blocks for memory in memories)
    length = min(memory.max_model_len for memory in memories)
    ranks = []
    for plan, memory in zip(plans, memories, strict=True):
        planned = planned_bytes(plan, blocks, length)
        ranks.append(RankPlan(plan, MemoryPlan(planned, memory.available, blocks, length)))
    return ranks


def _sizes(plan: ModelPlan, memory: MemoryPlan) -> dict[str, int]:
    """Return the bytes of a rank by entry, and their sums."""
    total = sum(memory.planned.values())
    left = memory.available - total
    sums = {"in all": total, "free now": memory.available, "left": left}
    if plan.kv_groups and plan.device.type == "cpu":
        caches = (KV_CACHE, DRAFT_KV_CACHE, STATES)
        filled = sum(memory.planned.get(name, 0) for name in caches) + plan.lens_bytes
        sums = {"at start": total - filled, **sums}
    return {**memory.planned, **sums}


def _table(ranks: Sequence[RankPlan]) -> Table:
    """Return a row for each entry: the exact size of a single rank, or the sizes of all."""
    sizes = [_sizes(*each) for each in ranks]
    table = Table(box=None, pad_edge=False, show_header=len(ranks) > 1)
    if len(ranks) == 1:
        table.add_column(justify="right")
    for number, (plan, _) in enumerate(ranks):
        on = f", {plan.device}" if plan.device.type == "cuda" else ""
        table.add_column(f"rank {number}{on}", justify="right")
    table.add_column(justify="left")
    for name, size in sizes[0].items():
        exact = [f"{size:,}"] if len(ranks) == 1 else []
        table.add_row(*exact, *[decimal(each.get(name, 0)) for each in sizes], name)
    return table


def _print(ranks: Sequence[RankPlan]) -> None:
    plan, memory = ranks[0]
    dtype = str(plan.dtype).removeprefix("torch.")
    write = sys.stdout.write
    write(f"{plan.architecture}, {plan.num_parameters:,} parameters, ")
    shares = f" of each of {len(ranks)} ranks" if len(ranks) > 1 else ""
    write(f"{dtype} on {plan.device.type}; bytes{shares}:\n")
    sys.stdout.flush()
    Console(width=100).print(_table(ranks))
    if plan.draft is not None:
        write(
            f"drafts by {plan.draft.architecture} with {plan.draft.num_parameters:,} parameters, "
        )
        write(f"up to {plan.draft.max_model_len} tokens of a sequence\n")
    if plan.prediction.module is not None:
        parameters = sum(p.numel() for p in plan.prediction.module.parameters())
        write(f"drafts by the prediction head (mtp) with {parameters:,} parameters\n")
    elif plan.prediction.unused:
        write(f"no drafts by the prediction head: {plan.prediction.unused}\n")
    if plan.kv_groups:
        form = plan.config.kv_cache_dtype
        stored = "" if form == "auto" else f" in {form}"
        write(f"{memory.num_blocks} KV blocks of {plan.config.block_size} tokens{stored}; ")
        write("sequences of up ")
        write(f"to {memory.max_model_len} tokens, {plan.config.max_num_seqs} in a step\n")
    if IMAGES in memory.planned:
        write(f"pixels of all open requests: up to {decimal(MOST_READ)} while they are read, ")
        write(f"and {decimal(MOST_WAITING)} in the engine\n")
    if plan.states.num_slots:
        states = plan.states
        write(f"{states.num_slots} slots of {states.slot_bytes:,} bytes for states: of running ")
        write("sequences, and snapshots at block edges\n")
