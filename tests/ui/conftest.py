"""Fixtures of the browser tests: the demo, Debian's chromium, and pages that report faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import write_seeing
from tests.ui.checks import pictures
from tests.ui.checks.prompt import send
from tests.ui.pages import SIZES, chromium, tab

TIMEOUT_MS = 30_000


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    with serving("demo") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. It ends with its module: its event loop would disturb asynchronous tests."""
    with chromium() as opened:
        yield opened


@pytest.fixture(params=SIZES, ids=str)
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty tab of either size and theme. See `tab`."""
    with tab(browser, request.param) as opened:
        yield opened


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a browser without history. Errors of the page's scripts fail the test.

    Options are those of playwright's `new_context`. `page.faults` collects the errors.
    """
    contexts = []
    faults: list[str] = []

    def opened(address: str, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.faults = faults
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")


@pytest.fixture(scope="session")
def seeing(seeing_model: Path) -> Iterator[Server]:
    limit = str(pictures.LIMIT)
    with serving(seeing_model, "--dtype", "float32", "--max-body-bytes", limit) as server:
        # The first image, so that their count is a series.
        send(server, [pictures.user(pictures.squares(0), "What is it?")])
        yield server


@pytest.fixture
def seeing_chat(open_page: Callable[..., Any], seeing: Server) -> Any:
    return pictures.chat_of(open_page, seeing)
