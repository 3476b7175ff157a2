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
from engine.memory.model_plan import Blueprint


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    try:
        blueprint = Blueprint(config)
        if sys.argv[2:] == ["anywhere"]:
            return 0
        plan = blueprint.memory_plan()
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 2
    taken, total = plan.taken, sum(plan.taken.values())
    rest = {"in all": total, "free now": plan.available, "left": plan.available - total}
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify)
    for what, size in [*taken.items(), *rest.items()]:
        table.add_row(f"{size:,}", decimal(size), what)
    dtype = str(blueprint.dtype).removeprefix("torch.")
    say = sys.stdout.write
    say(f"{blueprint.architecture}, {blueprint.parameters:,} parameters, ")
    say(f"{dtype} on {blueprint.device}; bytes:\n")
    sys.stdout.flush()
    Console(width=100).print(table)
    if blueprint.groups:
        say(f"{plan.num_blocks} KV blocks of {config.block_size} tokens; sequences of up to ")
        say(f"{plan.max_model_len} tokens, {config.max_num_seqs} in a step\n")
    return 0
