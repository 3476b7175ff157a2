"""Print the memory that serving takes. `main` takes CONFIG, the EngineConfig in JSON.

Nothing is loaded: shapes come from config.json. Status 2, with the reason, where it does not fit or
is not served at all; with `anywhere` behind CONFIG this machine's memory is not looked at.
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


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    try:
        plan = ModelPlan(config)
        if sys.argv[2:] == ["anywhere"]:
            return 0
        memory = plan.memory_plan()
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    taken, total = memory.taken, sum(memory.taken.values())
    rest = {"in all": total, "free now": memory.available, "left": memory.available - total}
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify)
    for what, size in [*taken.items(), *rest.items()]:
        table.add_row(f"{size:,}", decimal(size), what)
    dtype = str(plan.dtype).removeprefix("torch.")
    say = sys.stdout.write
    say(f"{plan.architecture}, {plan.parameters:,} parameters, ")
    say(f"{dtype} on {plan.device}; bytes:\n")
    sys.stdout.flush()
    Console(width=100).print(table)
    if plan.groups:
        say(f"{memory.num_blocks} KV blocks of {config.block_size} tokens; sequences of up to ")
        say(f"{memory.max_model_len} tokens, {config.max_num_seqs} in a step\n")
    return 0
