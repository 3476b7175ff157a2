"""The rooms of the house, and the imports between them.

A room is a folder or a file directly below `engine` or `server`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import combinations
from pathlib import Path

from tests.structure.measure import ROOT, folder_files, imports

Arrows = dict[str, set[str]]
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.BoolOp,
    ast.comprehension,
    ast.ExceptHandler,
    ast.match_case,
)


def arrows(top: str) -> Arrows:
    """Return which rooms of `engine` or `server` each of its rooms imports."""
    found: Arrows = defaultdict(set)
    for file in folder_files(top):
        room = _room(file.relative_to(ROOT).with_suffix("").parts)
        found[room].update(
            target
            for name in imports(file)
            if name.startswith(f"{top}.") and (target := _room(tuple(name.split(".")))) != room
        )
    return {room: targets & found.keys() for room, targets in found.items()}


def _room(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2])


def mutual_pairs(graph: Arrows) -> list[tuple[str, str]]:
    """Return the pairs of rooms that import each other."""
    pairs = combinations(sorted(graph), 2)
    return [(one, other) for one, other in pairs if other in graph[one] and one in graph[other]]


def knots(graph: Arrows) -> list[list[str]]:
    """Return the groups of rooms in which each room needs all others."""
    reached = {room: _reached(graph, room) for room in graph}
    groups = {
        tuple(sorted(other for other in reached[room] if room in reached[other]))
        for room in graph
        if room in reached[room]
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: Arrows, room: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[room]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def branches(file: Path) -> dict[str, int]:
    """Return the number of branches of each function in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name: sum(isinstance(part, BRANCHES) for part in ast.walk(node))
        for node in ast.walk(tree)
        if isinstance(node, functions)
    }
