"""A parser for the parts of Dockerfiles that the tests use."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))


@dataclass
class Stage:
    """One FROM and its instructions, after those of the stages it is based on."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # (instruction, arguments)

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.steps if name == instruction]

    def command(self, instruction: str) -> list[str]:
        """Return the exec form of the last CMD or ENTRYPOINT. Fails on the shell form."""
        [*_, words] = self.all(instruction)
        command = json.loads(words)
        assert isinstance(command, list)
        return command

    @property
    def environment(self) -> dict[str, str]:
        pairs = (pair for words in self.all("ENV") for pair in words.split())
        return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def stages(file: Path) -> list[Stage]:
    """Return the stages in the file's order. The last one is built by default."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, words = line.partition(" ")
        if instruction == "ARG" and not found:
            name, _, value = words.partition("=")
            arguments[f"${{{name}}}"] = value
        elif instruction == "FROM":
            base, _, name = words.partition(" AS ")
            parent = next((stage for stage in found if stage.name == base), None)
            real = parent.base if parent else arguments.get(base, base)
            found.append(Stage(real, name, list(parent.steps) if parent else []))
        elif found:
            found[-1].steps.append((instruction, " ".join(words.split())))
    return found
