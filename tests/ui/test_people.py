"""The pages for people: contrast, labels, keyboard, phones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server
from tests.ui import axe
from tests.ui.checks.chat import fill_options
from tests.ui.listed_pages import listed_pages, page_ids

pytestmark = [pytest.mark.ui, pytest.mark.slow]
LOOKS = [(scheme, width) for scheme in ("dark", "light") for width in (1280, 375)]


@pytest.fixture(scope="module", autouse=True)
def axe_source() -> None:
    try:
        axe.source()
    except OSError as error:
        pytest.skip(f"needs npm and its registry: {error}")


def say(page: Any, text: str, tokens: int = 24) -> Any:
    page.wait_for_selector("[name=max_tokens]", state="attached")
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("queue")
    return answer


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("name", page_ids())
def test_page_has_no_violation(
    open_page: Callable[..., Any], demo: Server, name: str, look: tuple[str, int]
) -> None:
    scheme, width = look
    viewport = {"width": width, "height": 900}
    page = open_page(f"{demo.base_url}/ui/#/{name}", viewport=viewport, color_scheme=scheme)
    page.wait_for_selector("main h1, main .chat, main .page")
    page.wait_for_load_state("networkidle") if name != "engine" else page.wait_for_timeout(1500)
    assert axe.violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("button", ["Why these tokens", "Why this time"])
def test_drawer_has_no_violation(
    open_page: Callable[..., Any], demo: Server, button: str, look: tuple[str, int]
) -> None:
    scheme, width = look
    viewport = {"width": width, "height": 900}
    page = open_page(f"{demo.base_url}/ui/", viewport=viewport, color_scheme=scheme)
    say(page, "Hello!").get_by_role("button", name=button).click()
    page.wait_for_selector(".drawer table, .drawer .wf-steps")
    assert axe.violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_pages_are_reached_by_their_keys(open_page: Callable[..., Any], demo: Server) -> None:
    page = open_page(f"{demo.base_url}/ui/")
    wait_for_box(page)
    page.evaluate("document.activeElement.blur()")
    shown, *others = listed_pages()
    for listed in (*others, shown):
        page.keyboard.press("g")
        page.keyboard.press(listed.key)
        playwright.expect(page).to_have_title(f"{listed.title} · Penstock")
        page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    playwright.expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog", name="Keys")).to_have_count(0)


def wait_for_box(page: Any) -> None:
    """Wait until the box to write in has the focus, which it gets when the page is drawn."""
    playwright.expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def tab_to(page: Any, **wanted: Any) -> None:
    """Press Tab until the element with this role and name has the focus."""
    target = page.get_by_role(wanted.pop("role"), **wanted).last
    for _ in range(120):
        if target.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{wanted} is not reached by Tab")


def test_journey_by_the_keyboard_alone(open_page: Callable[..., Any], demo: Server) -> None:
    """From a question over a token's fork to the waterfall and the lens, without a mouse."""
    page = open_page(f"{demo.base_url}/ui/")
    wait_for_box(page)
    fill_options(page, seed=11)  # its branch goes on behind the token
    page.get_by_role("textbox", name="Message").focus()
    page.keyboard.type("Hello! Who are you?")
    page.keyboard.press("Enter")
    answer = page.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("queue")
    tab_to(page, role="button", name="Why these tokens")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".drawer")).to_contain_text("replay agrees")
    tab_to(page, role="listbox", name="Tokens of the answer")
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    playwright.expect(page.locator(".drawer")).to_contain_text("has begun")
    tab_to(page, role="button", name="Close")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".drawer")).to_have_count(0)
    playwright.expect(answer.locator(".versions")).to_contain_text("2/2")
    playwright.expect(answer.locator(".figures")).to_contain_text("queue")
    branch = answer.locator(".md").inner_text()
    tab_to(page, role="button", name="Inside the model")
    page.keyboard.press("Enter")
    playwright.expect(page).to_have_title("Lens · Penstock")
    playwright.expect(page.get_by_text("Shows this answer with its prompt.")).to_be_visible()
    page.wait_for_selector(".lens-strip span")
    words = "".join(page.locator(".lens-strip span").all_inner_texts()).replace("·", " ")
    assert branch in words
    page.keyboard.press("g")
    page.keyboard.press("c")
    tab_to(page, role="button", name="Why this time")
    page.keyboard.press("Enter")
    page.wait_for_selector(".wf-steps")
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".drawer")).to_have_count(0)
