"""The documentation as a site: it builds without a warning, and its search finds pages."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.process import ROOT
from tests.ui.pages import chromium, tab

pytestmark = [pytest.mark.ui, pytest.mark.timeout(900)]

SITE = ROOT / "build" / "docs" / "site"
FIRST = 5  # results that a reader looks at
# The words that a user types, and the page that answers it.
QUESTIONS = {
    "install windows": "getting-started",
    "api key": "security",
    "gguf file": "gguf",
    "quantization int8": "quantization",
    "kubernetes": "deployment",
    "json schema": "generation",
    "prefix cache": "prompt-cache",
    "lora adapter": "lora",
    "reranking": "embeddings-reference",
    "claude code": "agents",
    "which models are supported": "models",
    "out of memory": "model-sizes",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """The log of a test has no lines of requests."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Build the site and serve it. A warning of the build fails the test."""
    command = ["make", "docs", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_search_finds_what_users_look_for_and_asks_no_other_server(site: str) -> None:
    missed = {}
    with chromium() as browser, tab(browser) as page:
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        for question, expected in QUESTIONS.items():
            found = search(page, site, question)[:FIRST]
            if expected not in found:
                missed[question] = found
        assert missed == {}
        assert {url for url in requested if not url.startswith((site, "data:", "blob:"))} == set()


def search(page: Any, site: str, question: str) -> list[str]:
    """Type a question into the search and return the names of the pages that it lists."""
    page.goto(site)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    page.get_by_placeholder("Search").fill(question)
    results = page.locator("a[href*='?h=']")
    results.first.wait_for(timeout=30_000)
    page.wait_for_timeout(300)
    links = results.evaluate_all("links => links.map(link => link.href)")
    return [link.removeprefix(site).split("/")[0] for link in links]
