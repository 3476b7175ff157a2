"""Other people's clients, unchanged, with a real server: a table of what each of them can do.

A runner per client drives the server from an environment of its own and reports its cells. The
test fails if a cell fails. A cell that the client cannot have names the reason.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.checkpoint.folder import model_folder
from engine.config import DEMO_MODEL
from tests.clients.environments import HERE, PYTHON, python_of
from tests.support.serve import Server, serving

# The first run installs the clients.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

KEY = "sk-clients"
RUN_S = 180
CELLS = (
    "chat",
    "stream",
    "usage",
    "n",
    "tools",
    "tools streamed",
    "json_schema",
    "400",
    "401",
    "429",
    "abort",
    "error in stream",
)


@dataclass(frozen=True)
class Cell:
    """One result. `passed` is None if the client has no such feature, for the reason given."""

    cell: str
    passed: bool | None
    reason: str

    @property
    def mark(self) -> str:
        if self.passed is None:
            return "-"
        return "yes" if self.passed else "NO"


def limited_key(client: str) -> str:
    return f"sk-{client}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, behind a key for all clients and a limited one for each."""
    limits = [f"{limited_key(name)} requests_per_minute=1" for name in RUNNERS]
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("\n".join([KEY, *limits]))
    with serving("demo", "--api-key-file", keys) as server:
        yield server


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with an end token that it never generates, so that its streams are long."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(model_folder(DEMO_MODEL), folder)
    config = json.loads((folder / "config.json").read_text())
    start = config["eos_token_id"] - 1  # <|im_start|>
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | {"eos_token_id": start}))
    return folder


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, list[Cell]]]:
    """The cells of each client, printed at the end."""
    table: dict[str, list[Cell]] = {}
    yield table
    print("\n\n" + rendered(table))


def rendered(table: dict[str, list[Cell]]) -> str:
    """Return the table as Markdown, followed by the reasons of the cells that did not pass."""
    lines = [
        "| client | " + " | ".join(CELLS) + " |",
        "|---" * (len(CELLS) + 1) + "|",
    ]
    reasons = []
    for client, cells in table.items():
        marks = {cell.cell: cell.mark for cell in cells}
        row = [marks.get(name, "") for name in CELLS]
        lines.append(f"| {client} | " + " | ".join(row) + " |")
        reasons += [f"- {client}, {cell.cell}: {cell.reason}" for cell in cells if not cell.passed]
    return "\n".join([*lines, "", *reasons])


def command_of(client: str) -> list[object]:
    return [python_of(client), HERE / "python" / f"run_{client}.py"]


RUNNERS = tuple(PYTHON)


@pytest.mark.parametrize("client", RUNNERS)
def test_client_with_a_real_server_passes_each_cell(
    client: str, server: Server, endless_model: Path, table: dict[str, list[Cell]]
) -> None:
    command = command_of(client)
    # This server dies in the last cell.
    with serving(endless_model, "--served-model-name", "demo") as endless:
        target = {
            "url": server.base_url,
            "key": KEY,
            "limited_key": limited_key(client),
            "endless_url": endless.base_url,
            "engine_pid": endless.engine.pid,
        }
        done = subprocess.run(
            [*map(str, command), json.dumps(target)], capture_output=True, text=True, timeout=RUN_S
        )
    cells = [Cell(**json.loads(line)) for line in done.stdout.splitlines()]
    table[client] = cells
    failed = [f"{cell.cell}: {cell.reason}" for cell in cells if cell.passed is False]
    assert not failed, "\n".join([*failed, done.stderr[-4000:]])
    assert tuple(cell.cell for cell in cells) == CELLS, done.stderr[-4000:]
