"""Print the memory that serving a model takes: `penstock serve MODEL --plan`.

`main` reads its arguments from the command line: the EngineConfig as JSON, and optionally
`anywhere`. Nothing is loaded: shapes come from config.json. The status is 2, with the reason on
stderr, if the model is not supported or does not fit; with `anywhere`, memory is not checked.
"""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.memory.report import DRAFT_KV_CACHE, KV_CACHE, STATES, MemoryPlan, plan_memory


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    check_memory = sys.argv[2:] != ["anywhere"]
    try:
        plan = ModelPlan(config)
        memory = plan_memory(plan) if check_memory else None
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    if memory is not None:
        _print(plan, memory)
    return 0


def _print(plan: ModelPlan, memory: MemoryPlan) -> None:
    total = sum(memory.planned.values())
    left = memory.available - total
    sums = {"in all": total, "free now": memory.available, "left": left}
    if plan.kv_groups and plan.device.type == "cpu":
        caches = (KV_CACHE, DRAFT_KV_CACHE, STATES)
        filled = sum(memory.planned.get(name, 0) for name in caches) + plan.lens_bytes
        sums = {"at start": total - filled, **sums}
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify)
    for name, size in [*memory.planned.items(), *sums.items()]:
        table.add_row(f"{size:,}", decimal(size), name)
    dtype = str(plan.dtype).removeprefix("torch.")
    write = sys.stdout.write
    write(f"{plan.architecture}, {plan.num_parameters:,} parameters, ")
    ranks = f", in each of {plan.ranks.count} ranks" if plan.ranks.count > 1 else ""
    write(f"{dtype} on {plan.device}; bytes{ranks}:\n")
    sys.stdout.flush()
    Console(width=100).print(table)
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
    if plan.states.num_slots:
        states = plan.states
        write(f"{states.num_slots} slots of {states.slot_bytes:,} bytes for states: of running ")
        write("sequences, and snapshots at block edges\n")
