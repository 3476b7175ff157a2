"""The form of the scripts in `findings/`. They are not run here, because they install packages."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "findings"
VALUED = ("-c", "-r", "-f", "-i", "-t", "--constraint", "--find-links", "--target")
IMPORTED = re.compile(r"^\s*(?:from|import)\s+(?:engine|server|loadtest|tests)\b", re.MULTILINE)


def faults(script: Path) -> list[str]:
    """Return what a script lacks."""
    text = script.read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    head = re.match(r"(?:#.*\n)*", rest)
    assert head is not None
    code = "\n".join(line for line in rest.splitlines() if not line.lstrip().startswith("#"))
    demands = {
        "is executable": os.access(script, os.X_OK),
        "begins with #!/usr/bin/env bash": first == "#!/usr/bin/env bash",
        "has comments at its head": len(head[0].splitlines()) >= 2,
        "sets -euo pipefail": "set -euo pipefail" in code.splitlines(),
        "makes a temporary folder": "mktemp -d" in code,
        "removes it by a trap": re.search(r"^trap .*rm -rf.*EXIT", code, re.MULTILINE) is not None,
        "does not use Penstock": "penstock" not in code.lower() and not IMPORTED.search(code),
    }
    found = [name for name, is_met in demands.items() if not is_met]
    return found + [f"pins {package}" for package in packages(code) if "==" not in package]


def packages(code: str) -> list[str]:
    """Return the packages that commands of pip install or download."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        command = re.search(r"\bpip\b.*?\s(?:install|download|wheel)\s([^|;&>]*)", line)
        words = shlex.split(command[1]) if command else []
        for before, word in zip(["", *words], words, strict=False):
            is_value = before in VALUED or before.endswith("-url")
            if not word.startswith("-") and not is_value:
                found.append(word)
    return found


def test_findings_have_their_form() -> None:
    files = sorted(FOLDER.glob("*")) if FOLDER.is_dir() else []
    assert [file.name for file in files if file.suffix != ".sh"] == []
    assert {file.name: faults(file) for file in files if faults(file)} == {}


GOOD = """#!/usr/bin/env bash
# A library does something that a reader would not guess.
# Version 1.2.3; it matters because Penstock reads the same files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --index-url https://a.example/simple \\
    "numpy==2.0.1" some[extra]==1.0 > /dev/null
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", ""),
        ("set -euo pipefail", "set -e", "sets -euo pipefail"),
        ("# A library", "echo A library", "has comments at its head"),
        ("mktemp -d", "pwd", "makes a temporary folder"),
        ("trap", "# trap", "removes it by a trap"),
        ("numpy==2.0.1", "numpy", "pins numpy"),
        ("python3 -m venv", "penstock serve", "does not use Penstock"),
        ("python3 -m venv", "import server\n#", "does not use Penstock"),
        ("/usr/bin/env bash", "/bin/sh", "begins with #!/usr/bin/env bash"),
    ],
)
def test_faults_of_a_script_are_found(tmp_path: Path, old: str, new: str, fault: str) -> None:
    script = tmp_path / "a.sh"
    script.write_text(GOOD.replace(old, new, 1))
    script.chmod(0o755)
    assert faults(script) == ([fault] if fault else [])


def test_script_that_is_not_executable_is_found(tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text(GOOD)
    assert faults(script) == ["is executable"]
