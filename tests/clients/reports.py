"""Scripts that report cells of several clients: run one, and print the table of all."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_S = 300


@dataclass(frozen=True)
class Cell:
    """One result of a client. `reason` is why it failed."""

    client: str
    cell: str
    passed: bool
    reason: str


def run_script(
    command: Sequence[str | Path],
    target: dict[str, Any],
    names: Sequence[str],
    table: list[Cell],
) -> None:
    """Run a script with the JSON of `target`, and add its cells, whose names are in `names`.

    Fails if a cell failed, with the end of the script's stderr.
    """
    done = subprocess.run(
        [*command, json.dumps(target)], capture_output=True, text=True, timeout=RUN_S
    )
    # LiteLLM prints on stdout, too.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    cells = [Cell(**json.loads(line)) for line in lines]
    table += cells
    failed = [f"{cell.client}, {cell.cell}: {cell.reason}" for cell in cells if not cell.passed]
    if failed or done.returncode:
        print(done.stderr[-4000:])
    assert not failed
    assert done.returncode == 0
    assert cells
    assert {cell.cell for cell in cells} <= set(names)


def rendered(table: Sequence[Cell], names: Sequence[str]) -> str:
    """Return the table as Markdown, with a column for each name of a cell."""
    lines = ["| client | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for client in dict.fromkeys(cell.client for cell in table):
        passed = {cell.cell: cell.passed for cell in table if cell.client == client}
        marks = [("yes" if passed[name] else "NO") if name in passed else "-" for name in names]
        lines.append(f"| {client} | " + " | ".join(marks) + " |")
    return "\n".join(lines)
