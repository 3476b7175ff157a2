"""Measure the pages in Chromium: `python -m tests.ui.measure [--minutes M]` prints a table.

First paint and the bytes of the first load come from a real server. A chat of 10,000 tokens is
streamed by a fetch inside the page, so that the frames are those of the page's own script.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from typing import Any

import playwright.sync_api as playwright

from tests.support.serve import serving

ROUNDS = 5
TOKENS = 10_000

# Answers requests for a chat with 10,000 tokens of markdown, some every few milliseconds.
STREAM = """
(() => {
  const text = Array.from({ length: 400 }, (_, i) => [
    `## Part ${i}\\n\\n`, "A *river* turns the **wheel**, and `the wheel` turns the stones. ",
    "Water is heavy; a litre has a kilogram.\\n\\n", "- one\\n- two\\n- three\\n\\n",
    "```python\\ndef add(a, b):\\n    return a + b\\n```\\n\\n",
  ].join("")).join("");
  const words = text.match(/\\s*\\S+|\\s+$/g);
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
    let place = 0;
    const body = new ReadableStream({
      async pull(control) {
        await new Promise((done) => setTimeout(done, 4));
        let out = "";
        for (let i = 0; i < 5 && place < TOKENS; i += 1, place += 1) {
          const delta = { content: words[place % words.length] };
          out += `data: ${JSON.stringify({ choices: [{ delta, token_ids: [5] }] })}\\n\\n`;
        }
        if (place >= TOKENS) {
          const end = { choices: [{ delta: {}, finish_reason: "stop" }] };
          out += `data: ${JSON.stringify(end)}\\n\\ndata: [DONE]\\n\\n`;
        }
        control.enqueue(new TextEncoder().encode(out));
        if (place >= TOKENS) control.close();
      },
    });
    return Promise.resolve(new Response(body, { headers: { "x-request-id": "none" } }));
  };
  window.frames_ = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      const script = entry.scripts.reduce((sum, one) => sum + one.duration, 0);
      const forced = entry.scripts.reduce((sum, one) => sum + one.forcedStyleAndLayoutDuration, 0);
      const names = entry.scripts.map((one) => `${one.invoker}:${Math.round(one.duration)}`);
      window.frames_.push([script - forced, forced, entry.duration, names].map(
        (one) => (Array.isArray(one) ? one : Math.round(one))));
    }
  }).observe({ type: "long-animation-frame" });
})()
""".replace("TOKENS", str(TOKENS))


def first_load(browser: Any, address: str) -> tuple[float, int]:
    """Return the ms until the first paint of the chat, and the bytes that were loaded for it."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(".welcome")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    sizes = page.evaluate(
        "performance.getEntries().filter(e => e.encodedBodySize).map(e => e.encodedBodySize)"
    )
    context.close()
    return paint, sum(sizes)


def heap(page: Any) -> int:
    """Return the bytes of the page's heap after a garbage collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used: int = session.send("Runtime.getHeapUsage")["usedSize"]
    return used


def long_chat(browser: Any, address: str) -> list[list[int]]:
    """Stream and scroll a long chat; return [script ms, frame ms] of the frames over 50 ms."""
    page = browser.new_page()
    page.add_init_script(STREAM)
    page.goto(address)
    page.wait_for_selector(".welcome")
    page.get_by_role("textbox", name="Message").fill("Write a long text.")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-busy]")
    page.wait_for_selector("[aria-busy]", state="detached", timeout=300_000)
    for _ in range(40):
        page.locator(".thread").evaluate("box => box.scrollBy(0, -box.scrollHeight / 40)")
        page.wait_for_timeout(30)
    found: list[list[int]] = page.evaluate("window.frames_")
    page.close()
    return found


def heap_growth(browser: Any, address: str, minutes: float) -> tuple[int, int]:
    """Return the heap's bytes before and after `minutes` with the page open."""
    page = browser.new_page()
    page.goto(address)
    page.wait_for_timeout(10_000)
    before = heap(page)
    page.wait_for_timeout(60_000 * minutes)
    after = heap(page)
    page.close()
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0, help="measure the heap for so long")
    arguments = parser.parse_args()
    with serving("demo") as server, playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        address = f"{server.base_url}/ui/"
        loads = [first_load(browser, address) for _ in range(ROUNDS)]
        paint = statistics.median(paint for paint, _ in loads)
        print(f"first paint, median of {ROUNDS}: {paint:.0f} ms")
        print(f"first load, as compressed: {max(size for _, size in loads)} bytes")
        frames = long_chat(browser, address)
        worst = max((frame[0] for frame in frames), default=0)
        print(
            f"chat of {TOKENS} tokens: longest script of a frame {worst} ms; "
            f"frames over 50 ms: {frames}"
        )
        if arguments.minutes:
            before, after = heap_growth(browser, f"{address}#/engine", arguments.minutes)
            print(f"heap, Engine page, {arguments.minutes} min: {before} to {after} bytes")
        browser.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
