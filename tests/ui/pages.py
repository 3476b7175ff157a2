"""Help for tests of a page: a browser, and a tab whose script errors fail the test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import playwright.sync_api as playwright
import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = [("dark", 1280), ("light", 375)]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start Debian's chromium, or skip the test."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Debian's chromium (apt install chromium)")
    with playwright.sync_playwright() as runner:
        opened = runner.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@contextlib.contextmanager
def tab(browser: Any, size: tuple[str, int] = SIZES[0]) -> Iterator[Any]:
    """Open a tab. Fails at the end if a script made an error or the page is too wide."""
    scheme, width = size
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if _is_fault(said) else None)
    try:
        yield page
        assert not errors
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{overflow} px too wide"
    finally:
        page.close()


def _is_fault(said: Any) -> bool:
    """Whether a console message is an error of a script, and no answer that the page shows."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")
