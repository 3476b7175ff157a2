"""Read the panels of dashboard.json and their queries in PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboard.json"
# Parts of a query that are not metric names: strings, matchers, ranges and label lists.
TEXTS = re.compile(r'"[^"]*"')
ASIDES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left)\s*\([^)]*\)")
NAMES = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
OPERATORS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


@dataclass(frozen=True)
class Panel:
    """One panel. `x`, `y`, `width` and `height` count cells of Grafana's grid of 24 columns."""

    title: str
    kind: str  # row, stat, timeseries or heatmap
    unit: str
    queries: tuple[tuple[str, str], ...]  # (PromQL with variables, legend)
    x: int
    y: int
    width: int
    height: int
    top: float | None  # upper end of the axis; None if it is not set


def load() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def panels() -> Iterator[Panel]:
    for panel in load()["panels"]:
        defaults, grid = panel.get("fieldConfig", {}).get("defaults", {}), panel["gridPos"]
        queries = [(t["expr"], t["legendFormat"]) for t in panel.get("targets", ())]
        yield Panel(
            panel["title"], panel["type"], defaults.get("unit", "none"), tuple(queries),
            grid["x"], grid["y"], grid["w"], grid["h"], defaults.get("max"),
        )  # fmt: skip


def substitute(query: str, variables: Mapping[str, str]) -> str:
    """Return the query with its variables replaced by their values, as Grafana sends it."""
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], query)


def metric_names(query: str) -> set[str]:
    """Return the names of the series that a query reads."""
    bare = ASIDES.sub(" ", TEXTS.sub("", query))
    return {name for name in NAMES.findall(bare) if name.lower() not in OPERATORS}
