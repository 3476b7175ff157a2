"""Fixtures of the browser tests: the demo, Debian's chromium, and pages that report faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serve import Server, serving
from tests.ui.pages import SIZES, chromium, tab

TIMEOUT_MS = 30_000

# Tests that `make test` runs; `make test-ui` runs all.
QUICK = {
    *(
        "test_answer_is_that_of_the_api_with_the_parameters_that_differ",
        "test_regenerate_edit_and_branches",
    ),
    *("test_tool_call_is_shown_and_answered_by_hand", "test_streamed_attacks_do_nothing"),
    *("test_figures_equal_the_reference", "test_keyboard_moves_over_tokens_and_forks"),
    *(
        "test_drawer_shows_the_parts_of_the_report",
        "test_pages_of_one_client_receive_nothing_of_another",
    ),
    *(
        "test_route_refuses_strangers",
        "test_send_twice_shares_blocks",
        "test_state_follows_windows_groups_and_preemptions",
    ),
    "test_prompt_page_boxes_are_the_tokens_and_states_of_the_next_request",
}

# Their variants that it leaves out: the other theme, and more answers for the Inspector.
VARIANTS = ("light", "-nucleus]", "-floor]", "-greedy]", "-narrow]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of pages that `make test` leaves out."""
    folder = Path(__file__).parent
    for item in items:
        name = getattr(item, "originalname", item.name)
        is_quick = name in QUICK and not any(variant in item.name for variant in VARIANTS)
        if folder in item.path.parents and not is_quick:
            item.add_marker(pytest.mark.slow)


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
