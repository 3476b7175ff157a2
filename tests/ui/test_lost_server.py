"""The pages while the server is lost, when it is back, and when it refuses the key."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server, serving

pytestmark = pytest.mark.ui
STATUS = re.compile("cannot be reached")


@pytest.mark.parametrize("file", ["lens/page.js", "lens/heat.js"], ids=["page", "its import"])
def test_page_that_did_not_load_is_shown_when_the_server_is_back(
    open_page: Callable[..., Any], demo: Server, file: str
) -> None:
    page = open_page(f"{demo.base_url}/ui/")
    page.wait_for_selector(".welcome")
    page.route(f"**/{file}", lambda route: route.abort())
    page.route("**/ui/api/hello", lambda route: route.abort())
    page.get_by_role("link", name="Lens").click()
    playwright.expect(page.get_by_role("button", name="Load again")).to_be_visible()
    playwright.expect(page.locator(".status")).to_contain_text(STATUS)
    page.unroute_all()
    page.wait_for_selector("main form")
    page.close()
    page.faults.clear()  # the browser's own lines about the lost server


def test_status_has_no_figures_of_a_lost_server(
    open_page: Callable[..., Any], demo: Server
) -> None:
    page = open_page(f"{demo.base_url}/ui/")
    status = page.locator(".status")
    playwright.expect(status).to_contain_text("running")
    page.route("**/ui/api/hello", lambda route: route.abort())
    playwright.expect(status).to_contain_text(STATUS)
    playwright.expect(status).not_to_contain_text("running")
    playwright.expect(status).not_to_contain_text("KV")
    page.unroute_all()
    playwright.expect(status).to_contain_text("running")
    page.close()
    page.faults.clear()


def test_end_of_a_lost_answer_is_in_view(open_page: Callable[..., Any], demo: Server) -> None:
    page = open_page(f"{demo.base_url}/ui/", viewport={"width": 1280, "height": 500})
    page.wait_for_selector(".welcome")
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "A line.\\n\\n"}}]}\n\n'
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=event * 80),
    )
    page.get_by_role("textbox", name="Message").fill("Hello!")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".failure")).to_be_visible()
    playwright.expect(page.get_by_role("button", name="Try again")).to_be_in_viewport()


def test_key_dialog_has_the_focus_in_its_box_and_says_that_a_key_is_wrong(
    open_page: Callable[..., Any],
) -> None:
    with serving("demo", "--api-key", "sk-right") as server:
        page = open_page(f"{server.base_url}/ui/")
        dialog = page.get_by_role("dialog", name="API key")
        box = dialog.get_by_label("API key")
        playwright.expect(box).to_be_focused()
        playwright.expect(dialog.get_by_role("alert")).to_have_count(0)
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        playwright.expect(dialog.get_by_role("alert")).to_contain_text("refused this key")
        playwright.expect(box).to_be_focused()
        page.keyboard.type("sk-right")
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".status")).to_contain_text("running")
        playwright.expect(dialog).to_have_count(0)
        page.close()
        page.faults.clear()  # the browser's own lines about the 401s
