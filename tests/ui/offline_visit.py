"""Serve the demo and visit its pages: run by test_offline.py where there is no network.

The arguments are the ids of the pages.

Prints a JSON object: the addresses of all requests of the browser, the errors of its scripts, and
the bytes of the first load.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import playwright.sync_api as playwright

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


def wait_ready() -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{URL}/ready").close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise TimeoutError("the server did not become ready")


def visit(page: Any, ids: list[str], found: dict[str, Any]) -> None:
    page.on("request", lambda request: found["requests"].append(request.url))
    page.on("pageerror", lambda error: found["faults"].append(str(error)))
    page.on("console", lambda line: line.type == "error" and found["faults"].append(line.text))
    page.goto(f"{URL}/ui/")
    page.wait_for_selector(".welcome")
    page.wait_for_selector("[name=temperature]")
    page.wait_for_load_state("networkidle")
    found["bytes"] = page.evaluate(
        "performance.getEntries().reduce((sum, e) => sum + (e.encodedBodySize || 0), 0)"
    )
    page.get_by_role("textbox", name="Message").fill("Hello!")
    page.keyboard.press("Enter")
    answer = page.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("queue", timeout=30_000)
    for button in ("Why these tokens", "Why this time"):
        answer.get_by_role("button", name=button).click()
        page.wait_for_selector(".drawer h2")
        page.wait_for_timeout(500)
        page.keyboard.press("Escape")
    for name in ids:
        page.goto(f"{URL}/ui/#/{name}")
        page.wait_for_timeout(1000)
        found["texts"].append(page.locator("main").inner_text())


def main() -> None:
    found: dict[str, Any] = {"requests": [], "faults": [], "texts": [], "bytes": 0}
    command = [sys.executable, "-m", "server", "serve", "demo", "--port", str(PORT)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready()
        with playwright.sync_playwright() as runner:
            browser = runner.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            visit(browser.new_page(), sys.argv[1:], found)
            browser.close()
    finally:
        server.terminate()
        server.wait(30)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
