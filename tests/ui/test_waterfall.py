"""The drawer "Why this time" in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import playwright.sync_api as playwright
import pytest

from tests.support.process import eventually
from tests.support.serve import Server, serving
from tests.ui.checks.crowd import crowded_request
from tests.ui.checks.watcher import watching
from tests.ui.checks.waterfall import PARTS, check_waterfall, ms

pytestmark = pytest.mark.ui
UI = {"x-penstock-ui": "1"}


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo without drafts, which would compute several tokens of a request in one step."""
    with serving("demo", "--speculation", "off") as server:
        yield server


@pytest.fixture(scope="module")
def report(demo: Server) -> dict[str, Any]:
    """The report of a request that the drawer shows."""
    body = {"prompt": "A river", "max_tokens": 30, "ignore_eos": True, "n": 2}
    url = f"{demo.base_url}/v1/completions"
    httpx2.post(url, json=body, headers={**UI, "x-request-id": "shown"}, timeout=60)
    address = f"{demo.base_url}/ui/api/requests/shown"
    eventually(lambda: httpx2.get(address, headers=UI).status_code == 200, "it is recorded")
    found: dict[str, Any] = httpx2.get(address, headers=UI).json()
    return found


@pytest.fixture(params=[("dark", 1280), ("light", 375)], ids=str)
def drawer(
    open_page: Callable[..., Any], demo: Server, report: object, request: pytest.FixtureRequest
) -> Any:
    """The page with the open drawer."""
    scheme, width = request.param
    address = f"{demo.base_url}/ui/#/chat?drawer=waterfall&request=shown"
    page = open_page(address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.wait_for_selector(".wf-steps")
    return page


def test_drawer_shows_the_parts_of_the_report(drawer: Any, report: dict[str, Any]) -> None:
    assert drawer.locator(".wf-legend dt").all_inner_texts() == PARTS
    # The fit may have grown by steps of other tests; the stamps have not.
    shown = dict(zip(PARTS, drawer.locator(".wf-legend dd").all_inner_texts(), strict=True))
    for name in ("server", "queue"):
        assert ms(shown[name]) == pytest.approx(report["parts"][name], rel=0.01, abs=0.01)
    overflow = drawer.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0


def test_drawer_agrees_with_the_client_a_viewer_and_itself(
    open_page: Callable[..., Any], demo: Server
) -> None:
    """The time is the client's, the steps a viewer's; the 900 tokens of a neighbour cost most."""
    with watching(demo) as watcher:
        request, measured = crowded_request(demo, watcher, "crowded")
    page = open_page(f"{demo.base_url}/ui/#/chat?drawer=waterfall&request={request}")
    page.wait_for_selector(".wf-steps")
    check_waterfall(page, measured)


def test_drawer_reads_out_the_step_under_the_cursor(drawer: Any, report: dict[str, Any]) -> None:
    row = drawer.locator(".wf-steps")
    row.focus()
    steps = report["steps"]
    for key, place in (("End", len(steps) - 1), ("ArrowLeft", len(steps) - 2), ("Home", 0)):
        drawer.keyboard.press(key)
        playwright.expect(row).to_have_attribute("aria-valuenow", str(place))
        text = row.get_attribute("aria-valuetext")
        assert text.startswith(f"step {steps[place]['n']}: ")
        playwright.expect(drawer.locator(".wf-step-line")).to_have_text(text)


def test_drawer_has_the_steps_as_a_table(drawer: Any, report: dict[str, Any]) -> None:
    drawer.get_by_text("Steps as a table").click()
    table = drawer.get_by_role("region", name="Table of steps")
    playwright.expect(table.locator("tbody tr")).to_have_count(len(report["steps"]))


def test_drawer_downloads_the_trace(drawer: Any) -> None:
    with drawer.expect_download() as download:
        drawer.get_by_role("button", name="Download trace").click()
    assert download.value.suggested_filename == "shown.trace.json"
    trace = json.loads(Path(download.value.path()).read_text())
    assert {"step", "prefill", "decode"} <= {event["name"] for event in trace["traceEvents"]}


def test_drawer_of_an_unknown_request_says_why(open_page: Callable[..., Any], demo: Server) -> None:
    page = open_page(f"{demo.base_url}/ui/#/chat?drawer=waterfall&request=nothing")
    playwright.expect(page.get_by_role("alert")).to_contain_text("No request 'nothing'")
    page.faults.clear()  # the browser's own line about the 404
