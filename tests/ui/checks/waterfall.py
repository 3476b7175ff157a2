"""The waterfall against the client's clock, the engine's steps as a viewer sees them, and its own
sums."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ui.checks.watcher import Step

PARTS = ["server", "queue", "base", "own", "others", "waiting for a core", "unexplained"]
COLUMNS = ["base", "own", "others", "waiting for a core", "unexplained"]
HALF = 0.0051  # ms: half a unit of a figure with two decimals
DURATION = r"\u2212?[\d.]+ (?:ms|s)\b"


@dataclass(frozen=True)
class Measured:
    """A request of the test, and its neighbours."""

    ids: set[int]
    milliseconds: float  # by the client's clock
    steps: list[Step]  # those that computed something of it
    neighbours: dict[str, tuple[int, set[int]]]  # by name: tokens of the prompt, and engine's ids


def ms(text: str) -> float:
    value, unit = re.fullmatch(r"([\d.\u2212]+) (ms|s)(?: .*)?", text.strip()).groups()  # type: ignore[union-attr]
    return float(value.replace("\u2212", "-")) * (1000 if unit == "s" else 1)


def rounding(text: str) -> float:
    """Half a unit of the last digit of a duration, in ms."""
    digits = text.strip().split()[0].partition(".")[2]
    half = 0.5 / 10 ** len(digits)
    return half * (1000 if " s" in text else 1)


def number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def check_parts(page: Any, milliseconds: float) -> dict[str, float]:
    """The parts sum to the wall time, which is the client's. Returns the parts in ms."""
    assert page.locator(".wf-legend dt").all_inner_texts() == PARTS
    texts = page.locator(".wf-legend dd").all_inner_texts()
    texts = [re.match(DURATION, text)[0] for text in texts]  # type: ignore[index]
    total, *line = re.findall(DURATION, page.locator(".wf-sum").inner_text())
    assert line == texts
    slack = sum(map(rounding, texts)) + rounding(total)
    assert sum(map(ms, texts)) == pytest.approx(ms(total), abs=slack)
    assert milliseconds - 20 <= ms(total) <= milliseconds + rounding(total)
    return dict(zip(PARTS, map(ms, texts), strict=True))


def rows_of(page: Any) -> list[list[str]]:
    """The table of steps."""
    page.get_by_text("Steps as a table").click()
    page.get_by_role("region", name="Table of steps").wait_for()
    script = "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    selector = "[aria-label='Table of steps'] tbody tr"
    found: list[list[str]] = page.eval_on_selector_all(selector, script)
    return found


def check_steps(page: Any, measured: Measured, parts: dict[str, float]) -> None:
    """The steps are those that a viewer has seen, and their parts those of the fit."""
    rows = [row for row in rows_of(page) if "waits" not in row]
    assert len(rows) == len(measured.steps)
    end = None  # of the step before: a busy engine leaves no gap between steps
    next_at = number(rows[0][1])
    fit = _fit(page)
    sums = dict.fromkeys(COLUMNS, 0.0)
    for row, step in zip(rows, measured.steps, strict=True):
        at, duration, prefill, decodes, *columns = map(number, row[1:])
        assert row[0] == str(step.number)
        if end is not None:
            assert duration == pytest.approx((step.end - end) / 1000, abs=2 * HALF)
        end = step.end
        assert at == pytest.approx(next_at, abs=0.11)
        next_at = at + duration
        chunks = [step.chunks[one] for one in measured.ids if one in step.chunks]
        assert prefill == sum(count for _, count in chunks)
        assert decodes == len(measured.ids & step.decodes)
        assert sum(columns) == pytest.approx(duration, abs=5 * HALF)
        shares = dict(zip(COLUMNS, columns, strict=True))
        assert shares["base"] == pytest.approx(fit["base"], abs=fit["slack"] + HALF)
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in chunks)
        least = prefill * fit["prefill"] + decodes * fit["decode"] + pairs * fit["context"]
        if not decodes:  # a decode's context is not shown
            slack = prefill * 5e-5 + pairs * 5e-9
            assert shares["own"] == pytest.approx(least, abs=slack + 2 * HALF)
        for name in COLUMNS:
            sums[name] += shares[name]
    for name, total in sums.items():
        slack = len(rows) * HALF + rounding(_legend(page, name))
        assert parts[name] == pytest.approx(total, abs=slack)


def _legend(page: Any, part: str) -> str:
    text: str = page.locator(".wf-legend dd").nth(PARTS.index(part)).inner_text()
    return re.match(DURATION, text)[0]  # type: ignore[index]


def _fit(page: Any) -> dict[str, float]:
    """The fit's coefficients in ms, and the rounding of the constant."""
    text = page.locator(".wf-fit").inner_text()
    figures = rf"a step takes ({DURATION}) \+ ([\d.]+) µs .* \+ ([\d.]+) µs .* \+ ([\d.]+) ns"
    base, prefill, decode, context = re.search(figures, text, re.DOTALL).groups()  # type: ignore[union-attr]
    return {
        "base": ms(base),
        "slack": rounding(base),
        "prefill": float(prefill) / 1e3,
        "decode": float(decode) / 1e3,
        "context": float(context) / 1e6,
    }


def check_neighbours(page: Any, measured: Measured, parts: dict[str, float]) -> None:
    """Each neighbour has the tokens that it computed in these steps; their costs sum up.

    The first neighbour of `measured` must be the dearest.
    """
    rows = page.get_by_role("region", name="Who cost what").locator("tbody tr").all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    shown = {row[0].split()[-1]: row[1:] for row in cells}
    assert shown.keys() == measured.neighbours.keys()
    first = next(iter(measured.neighbours))
    assert cells[0][0].endswith(f" {first}")
    for name, (tokens, ids) in measured.neighbours.items():
        prompt, decodes, cost, _, _ = shown[name]
        assert prompt == f"{tokens:,} tok"
        assert int(decodes.replace(",", "")) == sum(len(ids & s.decodes) for s in measured.steps)
        assert ms(cost) <= parts["others"] + rounding(cost)
    costs = [cost for _, _, cost, _, _ in shown.values()]
    slack = sum(map(rounding, costs)) + rounding(_legend(page, "others"))
    assert sum(map(ms, costs)) == pytest.approx(parts["others"], abs=slack)


def check_waterfall(page: Any, measured: Measured) -> None:
    parts = check_parts(page, measured.milliseconds)
    check_steps(page, measured, parts)
    check_neighbours(page, measured, parts)
