"""Every command of README and docs, run as printed with the installed wheel.

A page's commands run in order, in a folder with the files that the pages name. The others have a
reason in `documented_rules.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.clients.environments import NODE, VECTORS, node_folder, python_of, vectors_python_of
from tests.clients.environments import installed as client
from tests.deploy.documented import ROOT, commands_of, commands_outside_blocks, pages
from tests.deploy.documented_rules import Reason, reason_of
from tests.deploy.installed import Installed

PAGE_S = 3000
NAMESPACES = ("--user", "--map-root-user", "--pid", "--fork", "--net", "--mount-proc")
WITH_COMMANDS = [
    str(page.relative_to(ROOT))
    for page in pages()
    if any(reason_of(command) is None for command in commands_of(page))
]


def clients() -> dict[str, Path]:
    """Return the interpreters for the programs of the pages, by a package that they import.

    The first name that a program imports decides."""
    return {
        "langchain_openai import ChatOpenAI": python_of("langchain"),
        "langchain_openai": vectors_python_of("langchain"),
        "langchain_cohere": vectors_python_of("langchain_cohere"),
        "llama_index.llms": python_of("llama_index"),
        "llama_index.postprocessor": vectors_python_of("llama_index_cohere"),
        "litellm": vectors_python_of("litellm"),
        "anthropic": python_of("anthropic"),
        "pydantic_ai": python_of("pydantic_ai"),
        "instructor": python_of("instructor"),
        "agents": python_of("agents"),
        "haystack": vectors_python_of("haystack"),
        "huggingface_hub": vectors_python_of("huggingface_hub"),
        "cohere": vectors_python_of("cohere"),
        "openai": client("documented", (*VECTORS["openai"], "numpy==2.4.6")),
    }


@pytest.fixture(scope="module")
def rig(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.deploy.documented_files import write_files
    from tests.deploy.run_page import Rig

    folder = tmp_path_factory.mktemp("documented")
    for name in ("home", "work"):
        (folder / "files" / name).mkdir(parents=True)
    write_files(folder / "files" / "home", folder / "files" / "work")
    found = Rig(
        bin=str(installed.bin),
        files=str(folder / "files"),
        clients={name: str(python) for name, python in clients().items()},
        node=str(node_folder("openai_node", NODE["openai_node"])),
    )
    path = folder / "rig.json"
    path.write_text(json.dumps(asdict(found)))
    return path


@pytest.mark.clients
@pytest.mark.timeout(PAGE_S)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_page_run_as_printed(page: str, rig: Path) -> None:
    command = [
        "unshare",
        *NAMESPACES,
        sys.executable,
        "-m",
        "tests.deploy.run_page",
        page,
        str(rig),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    print(*(f"{each['seconds']:6.1f} s  {each['text']}" for each in outcomes), sep="\n")
    assert len(outcomes) == len(list(commands_of(ROOT / page)))
    failed = [f"{page}:{each['line']}: {each['text']}\n{each['failure']}" for each in outcomes]
    assert [text for text, each in zip(failed, outcomes, strict=True) if each["failure"]] == []


def test_each_command_is_run_or_has_a_reason() -> None:
    commands = [command for page in pages() for command in commands_of(page)]
    found = Counter(reason_of(command) for command in commands)
    assert set(found) == {None, *Reason}
    assert found[None] > 0.5 * len(commands)
    outside = {page.name: commands_outside_blocks(page) for page in pages()}
    assert {name: lines for name, lines in outside.items() if lines} == {}
