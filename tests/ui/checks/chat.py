"""The chat: how tests use it."""

from __future__ import annotations

import re
from typing import Any

import playwright.sync_api as playwright


def fill_options(page: Any, **values: object) -> None:
    for name, value in values.items():
        field = page.locator(f"[name={name}]")
        field.fill(str(value))
        field.blur()


def ask(page: Any, text: str) -> Any:
    """Send a message and wait for the whole answer."""
    count = page.locator(".message").count()
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".message")).to_have_count(count + 2)
    return complete(page)


def complete(page: Any) -> Any:
    """Wait until the last answer is complete and has the engine's times; return it."""
    answer = page.locator(".message").last
    playwright.expect(page.locator("[aria-busy]")).to_have_count(0)
    playwright.expect(answer.locator(".figures")).to_contain_text("queue")
    return answer


def figure(answer: Any, pattern: str) -> str:
    """Return what the pattern's group finds in the line of figures under an answer."""
    text = answer.locator(".figures").inner_text()
    found = re.search(pattern, text)
    assert found, text
    return found[1]
