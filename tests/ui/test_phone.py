"""Sheets close by ×, Esc and a tap outside, and no page is wider than a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server
from tests.ui.checks.chat import ask
from tests.ui.checks.inspector import columns_of
from tests.ui.listed_pages import page_ids

pytestmark = pytest.mark.ui
PHONE = {"viewport": {"width": 360, "height": 700}, "has_touch": True}
WAYS = ("button", "Escape", "tap")


@pytest.fixture
def phone(open_page: Callable[..., Any], demo: Server) -> Any:
    page = open_page(f"{demo.base_url}/ui/", **PHONE)
    page.wait_for_selector(".welcome")
    return page


def close(page: Any, sheet: Any, way: str, outside: tuple[int, int]) -> None:
    if way == "button":
        sheet.get_by_role("button", name="Close", exact=True).click()
    elif way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.mouse.click(*outside)


@pytest.mark.parametrize(("name", "outside"), [("Chats", (350, 300)), ("Settings", (5, 300))])
def test_sides_of_the_chat_close_in_three_ways(
    phone: Any, name: str, outside: tuple[int, int]
) -> None:
    sheet = phone.get_by_role("complementary", name=name)
    for way in WAYS:
        phone.get_by_role("button", name=name, exact=True).click()
        playwright.expect(sheet).to_be_visible()
        close(phone, sheet, way, outside)
        playwright.expect(sheet).to_be_hidden()


@pytest.mark.parametrize("button", ["Why these tokens", "Why this time"])
def test_drawers_close_in_three_ways(phone: Any, button: str) -> None:
    answer = ask(phone, "Hello!")
    sheet = phone.get_by_role("dialog")
    for way in WAYS:
        answer.get_by_role("button", name=button).click()
        phone.wait_for_selector(".drawer table, .drawer .wf-steps")
        assert phone.evaluate("document.querySelector('.drawer').scrollWidth") <= 360
        close(phone, sheet, way, (100, 30))
        playwright.expect(sheet).to_have_count(0)


def test_list_of_keys_closes_in_three_ways_and_leaves_the_drawer(phone: Any) -> None:
    ask(phone, "Hello!").get_by_role("button", name="Why this time").click()
    phone.wait_for_selector(".drawer .wf-steps")
    keys = phone.get_by_role("dialog", name="Keys")
    for way in WAYS:
        phone.keyboard.press("?")
        playwright.expect(keys).to_be_visible()
        close(phone, keys, way, (3, 300))
        playwright.expect(keys).to_have_count(0)
        playwright.expect(phone.locator(".drawer")).to_have_count(1)


def test_escape_closes_a_sheet_before_it_stops_an_answer(phone: Any) -> None:
    phone.get_by_role("button", name="Settings", exact=True).click()
    phone.get_by_text("More parameters").click()
    phone.locator("[name=ignore_eos]").select_option("true")
    phone.locator("[name=max_tokens]").fill("3000")
    phone.keyboard.press("Escape")
    phone.get_by_role("textbox", name="Message").fill("Tell me a story.")
    phone.keyboard.press("Enter")
    phone.wait_for_selector("[aria-busy] .md")
    phone.get_by_role("button", name="Settings", exact=True).click()
    phone.keyboard.press("Escape")
    assert phone.locator("[aria-busy]").count() == 1
    phone.keyboard.press("Escape")
    playwright.expect(phone.locator(".figures")).to_contain_text("stopped by you")


@pytest.mark.parametrize("name", page_ids())
def test_no_page_is_wider_than_a_phone(phone: Any, demo: Server, name: str) -> None:
    phone.goto(f"{demo.base_url}/ui/#/{name}")
    phone.wait_for_selector("main h1")
    if name == "model":
        phone.wait_for_selector(".md-weights")
    elif name == "lens":
        phone.get_by_role("button", name="Look").click()
        phone.wait_for_selector("main table")
    widths = phone.evaluate(
        "[document.documentElement, document.getElementById('main')].map((e) => e.scrollWidth)"
    )
    assert max(widths) <= 360


def test_phone_shows_the_final_share_and_the_winner_first(
    phone: Any,
) -> None:
    ask(phone, "Hello!").get_by_role("button", name="Why these tokens").click()
    phone.wait_for_selector(".ins-table")
    assert columns_of(phone)[:3] == ["token", "final", "won"]
    assert phone.locator(".ins-table thead th").nth(2).bounding_box()["x"] < 360
    phone.set_viewport_size({"width": 1280, "height": 700})
    playwright.expect(phone.locator(".ins-table thead th").nth(1)).to_have_text("logit")
