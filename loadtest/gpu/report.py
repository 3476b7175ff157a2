"""The results of a run: its table and JSON, what the stop rules say, and lines for chips.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.kernels.triton.chips import Chip
from loadtest.gpu.bench import Row
from loadtest.gpu.sweeps import LAYER_SHAPES, TILE_OF
from loadtest.gpu.variants import STEPS, missing, variants

# Stop rules of the design, in microseconds or as shares.
LEAST_A_LAUNCH = 0.1
LEAST_OF_FOLDING = 4.0
LEAST_OF_PREFETCH = 0.5
MOST_SLOWER_ATTENTION = 0.05
LEAST_GAIN = 0.01  # a variant that gains less than this share of a layer's time stays off
SLOWER_SHAPES = 2  # of the four of a model

Chain = dict[str, dict[str, Row]]  # by case (model and rows), then by the field that is added


def line(row: Row) -> str:
    """Return one line of the table."""
    verdict = {True: "met", False: "MISSED", None: ""}
    sign = "at most" if row.at_most else "at least"
    goal = "" if row.goal is None else f"{sign} {row.goal:g}"
    value = f"{row.value:,.4g} {row.unit}" if row.value < 1e4 else f"{row.value:,.0f} {row.unit}"
    return f"| {row.what} | {value} | {goal} | {verdict[row.met]} | {row.note} |"


def table(rows: list[Row], failed: dict[str, str]) -> str:
    """Return all rows and failed sections as a Markdown table."""
    lines = ["| what | measured | goal | | note |", "|---|---|---|---|---|", *map(line, rows)]
    lines += [f"| {name} | FAILED | | | {why} |" for name, why in failed.items()]
    return "\n".join(lines)


def write_json(path: Path, said: dict[str, Any], rows: list[Row], failed: dict[str, str]) -> None:
    """Write everything measured so far, and what it means for the stop rules."""
    figures = [asdict(row) | {"met": row.met} for row in rows]
    result = said | {"rows": figures, "stop_rules": stop_rules(rows), "failed": failed}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def chain_of(rows: Sequence[Row]) -> Chain:
    """Return the rows of section chain."""
    found: Chain = {}
    for row in rows:
        if row.what.startswith("chain, "):
            _, model, count, variant = row.what.split(", ")
            found.setdefault(f"{model}, {count}", {})[variant.split()[1]] = row
    return found


def stop_rules(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each stop rule about which these rows say something."""
    found = []
    for case, chain in chain_of(rows).items():
        found += [f"{case}: {text}" for rule in CHAIN_RULES if (text := rule(chain))]
    return [*found, *cublas_rule(rows)]


def trigger_rule(chain: Mapping[str, Row]) -> str:
    if not {"overlap", "trigger_first"} <= chain.keys():
        return ""
    before, after = chain["overlap"], chain["trigger_first"]
    gain = (before.value - after.value) / max(before.figures["launches"], 1.0)
    verdict = "gains" if gain >= LEAST_A_LAUNCH else "keep it for the order, expect nothing:"
    return f"trigger_first: {verdict} {gain:.2f} us a launch"


def folding_rule(chain: Mapping[str, Row]) -> str:
    gain = gained(chain, "folded")
    if gain is None:
        return ""
    if gain < LEAST_OF_FOLDING:
        return f"folded: {gain:.1f} us a layer: ramps dominate; early weights and prefetch first"
    return f"folded: gains {gain:.1f} us a layer"


def prefetch_rule(chain: Mapping[str, Row]) -> str:
    if not {"fused_attention", "prefetch_bytes"} <= chain.keys():
        return ""
    before, after = chain["fused_attention"].figures, chain["prefetch_bytes"].figures
    faster = before["out_us"] - after["out_us"]
    slower = after["attention_us"] / max(before["attention_us"], 1e-9) - 1
    keeps = faster >= LEAST_OF_PREFETCH and slower <= MOST_SLOWER_ATTENTION
    verdict = "on" if keeps else "off"
    return (
        f"prefetch_bytes: {verdict}: out is {faster:.2f} us faster, attention {100 * slower:.1f} % "
        "slower"
    )


CHAIN_RULES: list[Callable[[Mapping[str, Row]], str]] = [trigger_rule, folding_rule, prefetch_rule]


def cublas_rule(rows: Sequence[Row]) -> list[str]:
    """Return which shapes cuBLAS keeps at 32 rows: those where it is faster, if two of a model are.

    Rows that only have cuBLAS's time say nothing.
    """
    measured = {row.what: row.figures for row in rows if row.figures.get("best_us")}
    found = []
    for model, shapes in LAYER_SHAPES.items():
        names = {f"linear, 32 rows, {i} to {o}": f"{i} to {o}" for i, o in shapes}
        both = {name: measured[what] for what, name in names.items() if what in measured}
        slower = [name for name, it in both.items() if it["best_us"] > it["cublas_us"]]
        if len(slower) >= SLOWER_SHAPES:
            found.append(f"{model}, linear, 32 rows: cuBLAS keeps {'; '.join(slower)}")
        elif both:
            found.append(f"{model}, linear, 32 rows: ours for {', '.join(both)}")
    return found


def gained(chain: Mapping[str, Row], field: str) -> float | None:
    """Return the microseconds a layer that `field` gains over the variant before it."""
    order = [name for _, name, _ in STEPS if name in chain]
    if field not in order[1:]:
        return None
    return chain[order[order.index(field) - 1]].value - chain[field].value


def chosen(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields to switch on, with their values.

    A field is on if the geometric mean of a layer's time over all cases falls by LEAST_GAIN. The
    first one, `overlap`, has no variant before it in this chain: it keeps its own measurement.
    """
    cases = list(chain_of(rows).values())
    values = {field: value for _, field, value in STEPS}
    on: dict[str, Any] = {}
    for variant in variants(STEPS):
        gains = []
        for chain in cases:
            gain = gained(chain, variant.adds)
            if gain is not None:
                now = chain[variant.adds].value
                gains.append(math.log(max(now + gain, 1e-9) / max(now, 1e-9)))
        is_first = variant.adds == STEPS[0][1] and bool(cases)
        if is_first or (gains and sum(gains) / len(gains) >= LEAST_GAIN):
            on[variant.adds] = values[variant.adds]
    says_off = [text for text in stop_rules(rows) if "prefetch_bytes: off" in text]
    if says_off:
        on.pop("prefetch_bytes", None)
    return on


def chip_lines(rows: Sequence[Row], chip: Chip | None, path: Path | None) -> list[str]:
    """Return lines for the tables of engine/kernels/triton/chips.py, and where their rows are.

    `path` is the JSON of this run, which belongs into docs/benchmarks.
    """
    if not chain_of(rows):
        return []
    if chip is None:
        return ["No lines for chips.py: this was a dry run without a GPU."]
    if path is None:
        return ["No lines for chips.py: without --json no file has their rows."]
    on = chosen(rows)
    given = ", ".join(f"{field}={value!r}" for field, value in on.items())
    file = f"docs/benchmarks/{path.name}"
    lines = [f"Commit {path} as {file}, and write into engine/kernels/triton/chips.py:"]
    lines.append(f"CHIPS:    {chip}: Features({given}),")
    lines.append(f"MEASURED: {chip}: {{")
    for name, field, _ in STEPS:
        if field in on:
            row = next(r.what for r in rows if r.what.endswith(f"{name} {field}"))
            lines.append(f'    "{field}": Measurement("{file}", "{row}"),')
    lines.append("},")
    lines += [f"{row.what}: {row.note}" for row in rows if row.what.startswith(TILE_OF)]
    lines += [f"Not measured, because Features has no such field: {each}" for each in missing()]
    return lines
