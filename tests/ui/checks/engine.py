"""The map of KV blocks: its pixels against block tables that the test has rebuilt itself."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import playwright.sync_api as playwright

from tests.support.watched import Tables
from tests.ui.checks.watcher import Watcher

# Reads the colour of each block from the canvas, and the colours that the style sheet names.
PIXELS = """
() => {
  const canvas = document.querySelector(".en-section[aria-label='KV blocks'] canvas");
  const size = Number(canvas.dataset.size), columns = Number(canvas.dataset.columns);
  const context = canvas.getContext("2d");
  const at = (x, y) => Array.from(context.getImageData(x, y, 1, 1).data).slice(0, 3).join();
  const blocks = [];
  for (let block = 0; block < COUNT; block += 1) {
    const x = (block % columns) * size, y = Math.floor(block / columns) * size;
    // The corner has no dot and no hatch; the others show the dot and the hatch.
    const middle = (size - 1 - ((size - 1) >> 2)) >> 1;
    blocks.push([at(x, y), at(x + 3, y), at(x + middle, y + middle)]);
  }
  const probe = document.createElement("canvas").getContext("2d");
  const named = {};
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "free", "muted", ...[1,2,3,4,5,6,7,8].map((n) => `owner-${n}`)]) {
    probe.fillStyle = style.getPropertyValue(`--${name}`).trim();
    probe.fillRect(0, 0, 1, 1);
    named[name] = Array.from(probe.getImageData(0, 0, 1, 1).data).slice(0, 3).join();
  }
  return { blocks, named };
}
"""


def pause(page: Any) -> dict[str, Any]:
    """Pause the page; return the engine's tables as the page got them."""
    with page.expect_response("**/ui/api/blocks") as answer:
        page.get_by_role("button", name="pause").click()
    page.wait_for_selector(".en-stats[data-mode=paused]")
    tables: dict[str, Any] = answer.value.json()
    return tables


def expected(tables: Tables, count: int) -> list[tuple[str, ...]]:
    """(kind, colour) of each block."""
    owners: dict[int, set[int]] = {}
    for request, groups in tables.tables.items():
        for block in {block for table in groups.values() for block in table if block}:
            owners.setdefault(block, set()).add(request)
    found = []
    for block in range(1, count + 1):
        ids = sorted(owners.get(block, ()))
        if ids:
            kind = "shared" if len(ids) > 1 else "held"
            found.append((kind, f"owner-{(ids[0] - 1) % 8 + 1}"))
        else:
            found.append(("cached" if block in tables.findable else "free", "free"))
    return found


def shown(page: Any, count: int) -> list[tuple[str, ...]]:
    """(kind, colour) of each block, read from the canvas."""
    picture = page.evaluate(PIXELS.replace("COUNT", str(count)))
    colors = {value: name for name, value in picture["named"].items()}
    found = []
    for corner, hatch, middle in picture["blocks"]:
        color = colors[corner]
        if color == "free":
            found.append(("cached" if colors[middle] == "muted" else "free", color))
        else:
            found.append(("shared" if colors[hatch] == "ground" else "held", color))
    return found


def check_map(page: Any, watcher: Watcher, count: int) -> set[str]:
    """Compare the map of the paused page. Returns the kinds of blocks that were on it."""
    tables = watcher.tables_at(int(page.get_attribute(".en-stats", "data-seq")))
    blocks = expected(tables, count)
    assert shown(page, count) == blocks
    playwright.expect(page.locator(".en-note")).to_contain_text("equal to the engine's own")
    return {kind for kind, _ in blocks}


def rounded(value: float, unit: str) -> str:
    """Round as JavaScript does: a half goes up."""
    return str(Decimal(value).quantize(Decimal(unit), ROUND_HALF_UP))


def check_steps(page: Any, watcher: Watcher) -> None:
    """Compare the table of the last steps of the paused page."""
    rows = page.get_by_role("region", name="Last steps").locator("tbody tr").all()
    assert rows
    watcher.tables_at(int(page.get_attribute(".en-stats", "data-seq")))  # its frame has come
    steps = {step.number: step for step in watcher.steps()}
    for row in rows:
        number, begin, duration, _, decodes, _ = row.locator("th, td").all_inner_texts()
        step = steps[int(number)]
        assert begin == rounded(step.begin / 1000, "0.1")
        assert duration == rounded(step.duration / 1000, "0.01")
        assert int(decodes) == len(step.decodes)
