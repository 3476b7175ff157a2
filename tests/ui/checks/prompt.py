"""The Prompt page against the tokenizer and the usage of the request that is sent next."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx2

from tests.support.serve import Server


def show(page: Any, demo: Server, **params: str) -> None:
    query = "&".join(f"{name}={quote(value)}" for name, value in params.items())
    page.goto("about:blank")
    page.goto(f"{demo.base_url}/ui/#/prompt?{query}")
    page.wait_for_selector(".pr-tokens")


def send(demo: Server, messages: Any, tokens: int = 2) -> dict[str, Any]:
    """Send a chat as any client does; return its usage."""
    body = {"messages": messages, "max_tokens": tokens}
    url = f"{demo.base_url}/v1/chat/completions"
    response = httpx2.post(url, json=body, timeout=60)
    assert response.status_code == 200
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def number_of(page: Any, selector: str) -> int:
    return int(page.locator(selector).first.inner_text().replace(",", ""))


def check_cached(page: Any, demo: Server, messages: Any) -> int:
    """Show a chat, and send it: the cached tokens of both are equal. Returns their number."""
    show(page, demo, messages=json.dumps(messages))
    cached = number_of(page, ".pr-cached-count")
    whole, part = page.locator(".pr-tokens .pr-cached"), page.locator(".pr-tokens .pr-part")
    assert whole.count() + part.count() == cached
    assert whole.count() == cached // 64 * 64
    count = number_of(page, ".pr-count")
    assert page.locator(".pr-tokens .pr-token").count() == count
    usage = send(demo, messages)
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert usage["prompt_tokens"] == count
    return cached


def check_tokens(page: Any, ids: list[int], texts: list[str]) -> None:
    """The table has the ids; the boxes have the texts, with spaces and line ends drawn."""
    boxes = page.locator(".pr-tokens .pr-token").all_inner_texts()
    assert boxes == [text.replace(" ", "·").replace("\n", "⏎") for text in texts]
    page.get_by_text("Tokens as a table").click()
    rows = page.get_by_role("region", name="Table of tokens").locator("tbody tr")
    rows.first.wait_for()
    assert [int(row.locator("td").first.inner_text()) for row in rows.all()] == ids
    offset = 0
    for row, text in zip(rows.all(), texts, strict=True):
        assert int(row.locator("td").nth(1).inner_text()) == offset
        offset += len(text)
