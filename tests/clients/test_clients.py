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
from tests.clients.environments import HERE, NODE, PYTHON, chromium, python_of, script_of
from tests.support.serve import Server, serving

# The first run installs the clients.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

KEY = "sk-clients"
RUN_S = 600  # Open WebUI needs half of it on two busy cores
START, START_TEXT = 1, "<|im_start|>"  # a token that the model never generates
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


RUNNERS = (*PYTHON, *NODE)
CODEX = "codex"
OPEN_WEBUI = "open_webui"
LONG_PROMPTS = (CODEX, OPEN_WEBUI)
LONG_CONTEXT = 32768  # the prompts of codex have 12,000 tokens, those of Open WebUI 11,000


def limited_key(client: str) -> str:
    return f"sk-{client}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key for all clients, and a limited one for each."""
    limits = [f"{limited_key(name)} requests_per_minute=1" for name in RUNNERS]
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("\n".join([KEY, *limits]))
    return keys


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[Server]:
    with serving("demo", "--api-key-file", keys) as server:
        yield server


def changed_demo(folder: Path, **fields: int) -> Path:
    """Return a copy of the demo model whose configuration has other values."""
    shutil.copytree(model_folder(DEMO_MODEL), folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | fields))
    return folder


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with an end token that it never generates, so that its streams are long."""
    fields = {"eos_token_id": START, "max_position_embeddings": LONG_CONTEXT}
    folder = changed_demo(tmp_path_factory.mktemp("endless") / "model", **fields)
    file = folder / "tokenizer_config.json"  # its end token ends answers, too
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": START_TEXT}))
    return folder


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Server]:
    """The demo model with a longer context than it was trained for."""
    folder = tmp_path_factory.mktemp("long") / "model"
    model = changed_demo(folder, max_position_embeddings=LONG_CONTEXT)
    flags = ("--served-model-name", "demo", "--max-num-seqs", 4, "--api-key-file", keys)
    with serving(model, *flags) as server:
        yield server


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


def run_client(client: str, server: Server, endless: Server, **more: str) -> list[Cell]:
    """Run a client's runner, and return its cells. Its stderr is printed if a cell failed.

    `more` is added to the runner's Target.
    """
    if client in NODE:
        command = ["node", script_of(client)]
    else:
        command = [python_of(client), HERE / "python" / f"run_{client}.py"]
    target = {
        "url": server.base_url,
        "key": KEY,
        "limited_key": limited_key(client),
        "endless_url": endless.base_url,
        "engine_pid": endless.engine.pid,
        **more,
    }
    done = subprocess.run(
        [*command, json.dumps(target)], capture_output=True, text=True, timeout=RUN_S
    )
    # LiteLLM prints on stdout, too.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    cells = [Cell(**json.loads(line)) for line in lines]
    failed = [f"{cell.cell}: {cell.reason}" for cell in cells if cell.passed is False]
    if failed or sorted(cell.cell for cell in cells) != sorted(CELLS):
        print(done.stderr[-4000:])
    return cells


def check(cells: list[Cell]) -> None:
    assert sorted(cell.cell for cell in cells) == sorted(CELLS)
    assert not [f"{cell.cell}: {cell.reason}" for cell in cells if cell.passed is False]


@pytest.mark.parametrize("client", [name for name in RUNNERS if name not in LONG_PROMPTS])
def test_client_with_a_real_server_passes_each_cell(
    client: str, server: Server, endless_model: Path, table: dict[str, list[Cell]]
) -> None:
    needs_node(client)
    # This server dies in the last cell.
    flags = ("--served-model-name", "demo", "--max-model-len", 1024)
    with serving(endless_model, *flags) as endless:
        table[client] = run_client(client, server, endless)
    check(table[client])


def test_codex_with_a_long_context_passes_each_cell(
    long_server: Server, endless_model: Path, table: dict[str, list[Cell]]
) -> None:
    needs_node(CODEX)
    flags = ("--served-model-name", "demo", "--max-num-seqs", 4)
    with serving(endless_model, *flags) as endless:
        table[CODEX] = run_client(CODEX, long_server, endless)
    check(table[CODEX])


def test_open_webui_in_a_browser_passes_each_cell(
    keys: Path, long_server: Server, endless_model: Path, table: dict[str, list[Cell]]
) -> None:
    browser = chromium()
    if browser is None:
        pytest.skip("needs Chromium")
    flags = ("--served-model-name", "demo", "--max-num-seqs", 4)
    short_flags = ("--max-model-len", 1024, "--api-key-file", keys)
    with serving(endless_model, *flags) as endless, serving("demo", *short_flags) as short:
        more = {"short_url": short.base_url, "browser": browser}
        cells = run_client(OPEN_WEBUI, long_server, endless, **more)
    table[OPEN_WEBUI] = cells
    check(cells)


def needs_node(client: str) -> None:
    if client in NODE and not shutil.which("npm"):
        pytest.skip("needs node and npm")
