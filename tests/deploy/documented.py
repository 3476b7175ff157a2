"""The commands and programs that README and docs print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("bash", "python", "js")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LOOKS_LIKE_A_COMMAND = re.compile(r"^ {4,}(?:penstock|python3?|pip|curl|make) \S", re.MULTILINE)
END_OF_COMMAND = {"|", "&", "&&", ";", ">", "<", "--"}


@dataclass(frozen=True)
class Command:
    """A command of a shell, or a program in another language, as a page prints it."""

    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands of the page's blocks. A Python block without imports continues the one
    before it."""
    text = page.read_text(encoding="utf-8")
    before = ""
    for block in BLOCK.finditer(text):
        indent, language, body = block.groups()
        line = text.count("\n", 0, block.start()) + 2
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        if language == "bash":
            for first, command in split_commands(body):
                yield Command(page.name, line + first, language, command)
        elif language in LANGUAGES:
            is_whole = re.search(r"^(import|from) ", body, re.MULTILINE) is not None
            before = body if is_whole or language != "python" else before + body
            yield Command(page.name, line, language, before)


def commands_outside_blocks(page: Path) -> list[str]:
    """Return indented commands, which `commands_of` does not find."""
    outside = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [found.group().strip() for found in LOOKS_LIKE_A_COMMAND.finditer(outside)]


def split_commands(block: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block of bash, and the number of the line on which each begins."""
    lines = block.splitlines()
    begin = 0
    for end in range(len(lines)):
        command = "\n".join(lines[begin : end + 1]).strip()
        if not is_complete(command):
            continue
        if command and not command.startswith("#"):
            yield begin, command
        begin = end + 1


def is_complete(command: str) -> bool:
    if command.endswith(("\\", "|")):
        return False
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quotation
        return False
    return True


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of each `penstock` command in a block of bash."""
    for page in pages():
        for command in commands_of(page):
            if command.language == "bash" and (words := words_of(command.text)):
                yield page.name, words


def words_of(text: str) -> list[str]:
    """Return the words after `penstock`, empty if the text is another command."""
    if not re.match(r"penstock [a-z]", text):
        return []
    words = shlex.split(text.replace("\\\n", " "), comments=True)[1:]
    ends = [place for place, word in enumerate(words) if word in END_OF_COMMAND]
    return words[: ends[0]] if ends else words
