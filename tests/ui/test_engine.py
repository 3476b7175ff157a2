"""The page Engine in a real browser: its pixels equal the engine's own tables."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server, serving
from tests.ui.checks.engine import check_map, check_steps, pause, shown
from tests.ui.checks.watcher import watching
from tests.ui.pages import tab

pytestmark = pytest.mark.ui
SMALL = ("--num-gpu-blocks-override", 40, "--max-num-seqs", 12, "--max-model-len", 768)
PAUSES = 30


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo with a KV cache so small that requests wait and are preempted."""
    with serving("demo", *SMALL) as server:
        yield server


def show(page: Any, demo: Server) -> Any:
    page.goto(f"{demo.base_url}/ui/#/engine")
    page.wait_for_selector(".en-stats")
    return page


@pytest.fixture
def engine(page: Any, demo: Server) -> Any:
    return show(page, demo)


@pytest.fixture
def traffic(demo: Server) -> Iterator[None]:
    """Random requests, some with common beginnings, some given up."""
    stop = threading.Event()
    seed = random.randrange(10**6)

    def client(number: int) -> None:
        rng = random.Random(seed + number)
        url = f"{demo.base_url}/v1/completions"
        while not stop.is_set():
            prompt = [9 + place % 50 for place in range(rng.randrange(1, 300))]
            body = {"prompt": [*prompt, rng.randrange(900)], "max_tokens": rng.randrange(1, 300)}
            try:
                httpx2.post(url, json=body | {"ignore_eos": True}, timeout=rng.choice((0.1, 60)))
            except httpx2.TimeoutException:
                continue

    threads = [threading.Thread(target=client, args=(number,)) for number in range(14)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("traffic")
def test_pixels_at_pauses_equal_the_engines_tables(engine: Any, demo: Server) -> None:
    kinds: set[str] = set()
    with watching(demo) as watcher:
        for _ in range(PAUSES // 2):  # in each of two layouts
            tables = pause(engine)
            assert int(engine.get_attribute(".en-stats", "data-seq")) == tables["seq"]
            kinds |= check_map(engine, watcher, tables["num_blocks"])
            engine.get_by_role("button", name="go on").click()
            engine.wait_for_timeout(random.randrange(300))
    assert {"held", "shared", "cached"} <= kinds
    overflow = engine.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0


@pytest.mark.usefixtures("traffic")
def test_table_of_steps_is_that_of_another_viewer(engine: Any, demo: Server) -> None:
    with watching(demo) as watcher:
        engine.goto("about:blank")
        engine.goto(f"{demo.base_url}/ui/#/engine?steps=table")
        engine.get_by_role("region", name="Last steps").wait_for()
        engine.wait_for_timeout(500)
        pause(engine)
        check_steps(engine, watcher)


@pytest.mark.usefixtures("traffic")
def test_queue_says_why_requests_wait(engine: Any) -> None:
    reasons = engine.get_by_role("region", name="Waiting requests").locator(".en-reason")
    playwright.expect(reasons.first).to_have_text(
        re.compile("no blocks|the batch is full|behind #|preempted|token budget|reuse")
    )


def test_send_twice_shares_blocks(engine: Any) -> None:
    engine.get_by_role("button", name="send ×2").click()
    running = "() => document.querySelector('.en-stats dd').textContent.trim() === '2'"
    engine.wait_for_function(running)
    tables = pause(engine)
    first, second = (set(request["tables"][0]) for request in tables["requests"])
    assert len(first & second) >= 3
    assert [kind for kind, _ in shown(engine, tables["num_blocks"])].count("shared") >= 3
    engine.get_by_label("by request").check()
    playwright.expect(engine.locator(".en-said").last).to_contain_text("shared by #")
    engine.get_by_role("checkbox", name="table").last.check()
    playwright.expect(engine.get_by_role("region", name="Block tables")).to_contain_text("/")
    assert "kv=requests" in engine.url
    assert "table=1" in engine.url


def test_traffic_of_the_page_moves_the_timeline_and_links_to_waterfalls(engine: Any) -> None:
    engine.get_by_role("button", name="make traffic").click()
    steps = engine.get_by_role("slider", name="Steps")
    steps.focus()
    engine.keyboard.press("Home")
    assert "step " in steps.get_attribute("aria-valuetext")
    before = steps.get_attribute("aria-valuemax")
    engine.keyboard.press("+")
    engine.keyboard.press("Shift+ArrowLeft")
    engine.keyboard.press("0")
    assert before is not None
    engine.keyboard.press(" ")
    engine.wait_for_selector(".en-stats[data-mode=paused]")
    engine.keyboard.press(" ")
    engine.wait_for_selector(".en-stats[data-mode=live]")
    ended = engine.locator("tr.en-ended a").first
    playwright.expect(ended).to_be_visible(timeout=30_000)
    ended.click()
    engine.wait_for_selector(".wf-steps")


def test_cursor_reads_out_blocks(engine: Any) -> None:
    grid = engine.get_by_role("slider", name="KV blocks")
    grid.focus()
    engine.keyboard.press("End")
    assert grid.get_attribute("aria-valuetext").startswith("block 40: ")
    engine.keyboard.press("ArrowLeft")
    assert grid.get_attribute("aria-valuetext").startswith("block 39: ")


RESYNC = """
async (frame) => {
  const { Watch } = await import("/ui/watch/watch.js");
  const { get } = await import("/ui/api.js");
  const watch = new Watch();
  const snapshot = await get("ui/api/blocks");
  watch.onHello({ ...snapshot, role: "admin", findable: [], seq: snapshot.seq - 1 });
  watch.onFrame({ t: snapshot.t, lost: true });
  watch.onFrame({ ...frame, seq: snapshot.seq });  // older than the snapshot to come
  while (watch.isResyncing) await new Promise((done) => setTimeout(done, 20));
  return [watch.state.difference(await get("ui/api/blocks")), watch.state.steps.length];
}
"""


def test_page_takes_a_snapshot_after_lost(engine: Any, demo: Server) -> None:
    """An event that the snapshot has already does no harm; its steps are kept."""
    demo.wait_idle()
    frame = {
        "t": 1,
        "steps": [[7, 0, 900, [[3, 0, 9]], [], [], [], [0, 0]]],
        "lenses": [],
        "requests": [],
        "kv": [["find", [1]], ["take", 3, 0, 0, [5]]],
        "queue": {},
        "stats": {},
    }
    found = engine.evaluate(RESYNC, json.loads(json.dumps(frame)))
    assert found == ["", 1]


def test_idle_page_explains_itself(browser: Any) -> None:
    with serving("demo") as server, tab(browser) as page:
        show(page, server)
        playwright.expect(page.get_by_text("The engine is idle.")).to_be_visible()


WINDOWS = """
async (frames) => {
  const { EngineState } = await import("/ui/watch/state.js");
  const { tableRows } = await import("/ui/watch/kv.js");
  const queue = { requests: [], first: null, reason: null };
  const state = new EngineState({
    seq: 0, t: 0, role: "admin", num_blocks: 9, groups: [{}, { window: 64 }], requests: [],
    findable: [], queue, stats: { held: 0, cached: 0, total: 9, generated: 0 },
  });
  const seen = [];
  for (const { kv, requests, held, cached } of frames) {
    const stats = { held, cached, total: 9, generated: 0 };
    state.apply({ seq: state.seq + 1, t: 1, steps: [], lenses: [], requests, kv, queue, stats });
    const rows = tableRows(state).map((row) => [row.request.id, row.group, [...row.table]]);
    seen.push([rows, state.blockOf(1).kind, state.agrees]);
  }
  return seen;
}
"""


def test_state_follows_windows_groups_and_preemptions(engine: Any) -> None:
    """Two requests share block 1; a window passes block 3; one is preempted, and one ends."""
    row = [1, "running", 99, 0, 1, 0, 0, None]
    other = [2, *row[1:]]
    frames = [
        {
            "kv": [["take", 1, 0, 0, [1, 2]], ["take", 1, 1, 0, [3, 4]], ["find", [1, 2]]],
            "requests": [row],
            "held": 4,
            "cached": 0,
        },
        {
            "kv": [["pass", 1, 1, 0, 1], ["take", 2, 0, 0, [1]]],
            "requests": [other],
            "held": 3,
            "cached": 0,
        },
        {
            "kv": [["preempt", 1]],
            "requests": [[1, "preempted", *row[2:]]],
            "held": 1,
            "cached": 1,
        },
        {"kv": [["end", 2], ["forget", [2]]], "requests": [], "held": 0, "cached": 1},
    ]
    assert engine.evaluate(WINDOWS, frames) == [
        [[[1, 0, [1, 2]], [1, 1, [3, 4]]], "held", True],
        [[[1, 0, [1, 2]], [1, 1, [0, 4]], [2, 0, [1]]], "shared", True],
        [[[2, 0, [1]]], "held", True],
        [[], "cached", True],
    ]
