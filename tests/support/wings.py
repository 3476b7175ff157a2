"""The wings of the server: the files that `tests.structure.without_wing` deletes with each.

A wing that is deleted for good also loses its entry in PARTS. While the entry is there and its
folder is not, the tests do not require what only the wing had: names in documents and in rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Parts:
    """A wing: paths from the root of the repository."""

    folders: tuple[str, ...]
    route: str = ""  # a path of the wing
    commands: tuple[str, ...] = ()  # files in server/cli
    cases: tuple[str, ...] = ()  # files in loadtest/micro
    fuzzed: tuple[str, ...] = ()  # files in tests/fuzz
    tests: tuple[str, ...] = ()  # globs


PARTS = {
    "replay": Parts(
        ("server/replay",),
        commands=("verify", "compare", "explain"),
        tests=(
            "tests/e2e/glassbox/test_explain_command.py",
            "tests/server/glassbox/explain/test_ablate_record.py",
        ),
    ),
    "batch": Parts(
        ("server/batch",),
        "/v1/files",
        commands=("run_batch", "engine_batch"),
        fuzzed=("batches", "batch_files"),
        tests=("tests/deploy/test_nginx_files.py",),
    ),
    "cohere": Parts(("server/api/cohere",), "/v2/embed"),
    "vllm": Parts(("server/api/vllm",), "/pooling"),
    "tei": Parts(("server/api/tei",), "/embed"),
    "llamacpp": Parts(("server/api/llamacpp",), "/completion"),
    "ollama": Parts(("server/ollama",), "/api/chat"),
    "glassbox": Parts(
        ("server/glassbox", "server/ui"),
        "/ui/",
        cases=("watch_steps", "watch_cost"),
        tests=("tests/ui/**/*.py",),
    ),
}


def modules_of(name: str) -> list[str]:
    """Return the modules and packages of a wing outside its tests."""
    parts = PARTS[name]
    return [
        *(folder.replace("/", ".") for folder in parts.folders),
        *(f"server.cli.{command}" for command in parts.commands),
        *(f"loadtest.micro.{case}" for case in parts.cases),
        *(f"tests.fuzz.{target}" for target in parts.fuzzed),
    ]


def lines_of(name: str) -> dict[str, str]:
    """Return the lines that name a wing: for each file, a regular expression."""
    parts = PARTS[name]
    found = {"server/app.py": rf"\b{name}\.WING\b|^from server\.\S+ import wing as {name}$"}
    if parts.commands:
        commands = "|".join(parts.commands)
        found["server/cli/main.py"] = rf"\((?:{commands})\)$|^from server\.cli\.(?:{commands}) "
    if parts.cases:
        found["loadtest/micro/__main__.py"] = rf"\b(?:{'|'.join(parts.cases)})\b"
    if parts.fuzzed:
        found["tests/fuzz/targets.py"] = rf"\b(?:{'|'.join(parts.fuzzed)})\b"
    return found


def absent_wings() -> list[str]:
    """Return the wings whose folder this tree lacks."""
    return [name for name, parts in PARTS.items() if not (ROOT / parts.folders[0]).is_dir()]


def is_of_absent_wing(path: str) -> bool:
    """Return whether a wing that this tree lacks had this file or folder."""
    return any(path.startswith(_starts_of(name)) for name in absent_wings())


def _starts_of(name: str) -> tuple[str, ...]:
    """Return the beginnings of the paths of a wing."""
    parts = PARTS[name]
    return (
        *(module.replace(".", "/") for module in modules_of(name)),
        *(f"tests/{folder}" for folder in parts.folders),
        *(pattern.partition("*")[0] for pattern in parts.tests),
        f"tests/e2e/{name}",
    )
