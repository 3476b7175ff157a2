"""Read the loops and loads of a kernel from its PTX, in the order of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

LABEL = re.compile(r"^(\$\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
LOAD = re.compile(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")


@dataclass(frozen=True)
class Loop:
    """A backward branch: its first and last line, and the bytes that a thread loads in between."""

    first: int
    last: int
    loads: tuple[int, ...]


def loops(ptx: str) -> list[Loop]:
    """Return the loops of a kernel. An outer loop also has the loads of the inner ones."""
    lines = ptx.splitlines()
    labels = {found[1]: n for n, line in enumerate(lines) if (found := LABEL.match(line))}
    found = []
    for last, line in enumerate(lines):
        target = BRANCH.search(line)
        if target is None or labels[target[1]] > last:
            continue
        first = labels[target[1]]
        loads = [
            int(load[1] or 1) * int(load[2]) // 8
            for each in lines[first:last]
            if (load := LOAD.search(each))
        ]
        found.append(Loop(first, last, tuple(loads)))
    return found


def line_of(ptx: str, text: str) -> int:
    """Return the number of the only line with this text."""
    (number,) = [n for n, line in enumerate(ptx.splitlines()) if text in line]
    return number
