"""The commands that README and docs print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
END_OF_COMMAND = {"|", "&", "&&", ";", ">", "<", "--"}


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of each `penstock` command in a block of bash."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = words_of(line)
                if words:
                    yield page.name, words


def words_of(line: str) -> list[str]:
    """Return the words after `penstock`, empty if the line is another command."""
    if not re.match(r"\s*penstock [a-z]", line):
        return []
    words = shlex.split(line.strip(), comments=True)[1:]
    ends = [place for place, word in enumerate(words) if word in END_OF_COMMAND]
    return words[: ends[0]] if ends else words
