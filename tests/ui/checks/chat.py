"""The chat: how tests use it."""

from __future__ import annotations

import re
from typing import Any

import playwright.sync_api as playwright
import pytest


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


def check_reply(page: Any, answer: Any, reply: dict[str, Any]) -> None:
    """Compare an answer with the reply of the official client to the same request."""
    choice, usage = reply["choices"][0], reply["usage"]
    assert answer.locator(".md").inner_text().split() == choice["message"]["content"].split()
    assert int(figure(answer, r"([\d,]+) tok ")) == usage["completion_tokens"]
    assert int(figure(answer, r"cached \d+/(\d+)")) == usage["prompt_tokens"]
    finish = {"stop": "stop", "length": "length: max tokens"}[choice["finish_reason"]]
    assert answer.locator(".figures").inner_text().endswith(f" {finish}")
    stored = answer_of(page, answer)
    assert stored["prompt"] == reply["prompt_token_ids"]
    assert stored["tokens"] == choice["token_ids"]


def check_strip(page: Any, answer: Any, texts: list[str]) -> None:
    """The Inspector shows tokens with these texts, and draws all of them again."""
    answer.get_by_role("button", name="Why these tokens").click()
    page.wait_for_selector(".ins-table")
    shown = page.locator(".ins-strip [role=option]").all_inner_texts()
    assert shown == [text.replace(" ", "·").replace("\n", "⏎") for text in texts]
    agrees = page.locator(".ins-agrees strong").inner_text()
    assert agrees == f"replay agrees {len(texts)}/{len(texts)}"


def check_usage(answer: Any, usage: dict[str, Any]) -> None:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert figure(answer, r"cached (\d+/\d+)") == f"{cached}/{usage['prompt_tokens']}"
    assert int(figure(answer, r"([\d,]+) tok ")) == usage["completion_tokens"]


def check_times(answer: Any, timings: dict[str, float]) -> None:
    """Compare queue, time to the first token and rate with `timings` of the API.

    The time to the first token is that before the submission, the queue, and `prompt_ms`.
    """
    queue = _ms(figure(answer, r"queue ([\d.]+ m?s)"))
    first = _ms(figure(answer, r"TTFT ([\d.]+ m?s)"))
    before = first - queue - timings["prompt_ms"]
    assert -1.2 <= before <= 60  # rounded to a ms; the chat template and the tokenizer take a few
    rate = float(figure(answer, r"([\d.]+) tok/s"))
    assert rate == pytest.approx(timings["predicted_per_second"], rel=0.06)


def _ms(text: str) -> float:
    return float(text.split()[0]) * (1000 if text.endswith(" s") else 1)


def answer_of(page: Any, answer: Any) -> dict[str, Any]:
    """The answer as the page stores it."""
    script = "async (id) => (await import('/ui/chat/answers.js')).answerOf(id)"
    found: dict[str, Any] = page.evaluate(script, answer.get_attribute("data-id"))
    return found
