"""Answers that attack the page: nothing runs, nothing is loaded, only known elements appear."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server
from tests.ui.attacks import attacks

pytestmark = pytest.mark.ui
ALLOWED = {
    *("DIV", "P", "SPAN", "A", "UL", "OL", "LI", "CODE", "PRE", "STRONG", "EM", "DEL", "BR", "HR"),
    *("BLOCKQUOTE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "INPUT", "FIGURE", "FIGCAPTION"),
    "BUTTON",
}
ALLOWED_ATTRIBUTES = {
    *("class", "href", "target", "rel", "data-at", "data-depth", "start", "type", "disabled"),
    *("checked", "role", "aria-level", "aria-label", "tabindex"),
}

# Shows every prefix of a text as it would while it is streamed, and returns what it found.
RENDER_PREFIXES = """
async ([texts, allowed, attributes]) => {
  const { html, render } = await import("/ui/html.js");
  const { Markdown } = await import("/ui/chat/markdown.js");
  const root = document.createElement("div");
  document.body.append(root);
  const found = [];
  const check = (text) => {
    for (const element of root.querySelectorAll("*")) {
      if (!allowed.includes(element.tagName)) found.push([text, element.tagName]);
      for (const { name, value } of element.attributes) {
        if (!attributes.includes(name)) found.push([text, name]);
        if (name === "href" && !/^https?:\\/\\//.test(value)) found.push([text, value]);
      }
    }
  };
  for (const text of texts) {
    render(null, root);
    for (let end = 1; end <= text.length; end += 1) {
      render(html`<${Markdown} text=${text.slice(0, end)} grows=${end < text.length} />`, root);
      check(text.slice(0, end));
    }
  }
  await new Promise((done) => setTimeout(done, 300));
  check("at the end");
  root.remove();
  return found;
}
"""


def stream_of(text: str) -> str:
    """Return a text as the stream of a chat, one event per character."""

    def event(delta: dict[str, str], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"

    return "".join(event({"content": one}) for one in text) + event({}, "stop") + "data: [DONE]\n\n"


@pytest.fixture
def page(open_page: Callable[..., Any], demo: Server) -> Any:
    """The chat. A dialog, a request to another origin and a report of the policy are faults."""
    opened = open_page(f"{demo.base_url}/ui/")
    opened.wait_for_selector("[name=temperature]")
    opened.on("dialog", lambda dialog: opened.faults.append(f"dialog: {dialog.message}"))

    def note(request: Any) -> None:
        if not request.url.startswith(demo.base_url):
            opened.faults.append(f"request: {request.url}")

    opened.on("request", note)
    opened.evaluate(
        "document.addEventListener('securitypolicyviolation', (e) => "
        "console.error('policy', e.violatedDirective, e.blockedURI))"
    )
    return opened


def check_unharmed(page: Any) -> None:
    assert page.evaluate("[window.hacked, document.title]") == [None, "Chat · Penstock"]


def test_every_prefix_of_an_attack_has_only_known_elements(page: Any) -> None:
    found = page.evaluate(RENDER_PREFIXES, [attacks(), sorted(ALLOWED), sorted(ALLOWED_ATTRIBUTES)])
    assert found == []
    check_unharmed(page)


def test_streamed_attacks_do_nothing(page: Any) -> None:
    text = ""

    def answer(route: Any) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=stream_of(text))

    page.route("**/v1/chat/completions", answer)
    for text in attacks()[::7]:
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("textbox", name="Message").fill(text)
        page.keyboard.press("Enter")
        playwright.expect(page.locator(".message").last.locator(".figures")).to_contain_text("stop")
        assert page.locator(".said").inner_text() == text
        for link in page.locator(".md a").all():
            assert link.get_attribute("href").startswith("http")
            assert "noopener" in link.get_attribute("rel")
    check_unharmed(page)


def test_setting_html_throws(page: Any) -> None:
    attempts = (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.createElement('script').src = 'https://evil.example/x.js'",
        "document.write('<b>x</b>')",
    )
    for attempt in attempts:
        text = page.evaluate(
            f"(() => {{ try {{ {attempt}; return 'allowed'; }} catch (e) {{ return e.name; }} }})()"
        )
        assert text == "TypeError", attempt
    page.wait_for_timeout(500)  # the browser reports each a moment later
    assert len(page.faults) >= len(attempts)
    page.faults.clear()
