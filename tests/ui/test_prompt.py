"""The Prompt page in a real browser: what its boxes say is what the server's tokens are."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

import httpx2
import playwright.sync_api as playwright
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from tests.support.serve import Server, serving
from tests.ui.checks.prompt import check_cached, check_tokens, number_of, send, show

pytestmark = pytest.mark.ui
LONG = "The river runs past the old mill and the three boats, " * 12
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello 😀!"}]


def wait_for_tokens(page: Any, text: str) -> None:
    """Wait until the boxes show this text; spaces and line ends are drawn."""
    drawn = text.replace(" ", "·").replace("\n", "⏎")
    page.wait_for_function(
        "drawn => document.querySelector('.pr-tokens').textContent.includes(drawn)", arg=drawn
    )


def test_prompt_page_boxes_are_the_tokens_and_states_of_the_next_request(
    page: Any, demo: Server
) -> None:
    usage = send(demo, CHAT)
    changed = [CHAT[0], {"role": "user", "content": "Hello you"}]
    assert check_cached(page, demo, changed) > 0
    assert number_of(page, ".pr-count") != usage["prompt_tokens"]


@pytest.mark.slow
def test_prompt_page_cached_tokens_are_those_of_the_next_request(page: Any, demo: Server) -> None:
    """After random traffic whose prompts begin in the same way."""
    words = LONG.split()
    found = set()
    for _ in range(20):
        rest = random.choices(words, k=random.randrange(1, 40))
        start = words[: random.randrange(len(words))]
        messages = [{"role": "user", "content": " ".join([*start, *rest])}]
        send(demo, messages, random.randrange(1, 30))
        start = words[: random.randrange(len(words))]
        messages = [{"role": "user", "content": " ".join([*start, *rest])}]
        found.add(check_cached(page, demo, messages))
    assert len(found) > 3


def test_prompt_page_tokens_are_those_of_the_tokenizer(page: Any, demo: Server) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder("demo") / "tokenizer.json"))
    encoding = tokenizer.encode("The river\nruns past 7 mills.")
    show(page, demo, text="The river\nruns past 7 mills.")
    check_tokens(page, encoding.ids, [tokenizer.decode([one]) for one in encoding.ids])


def test_prompt_page_emoji_split_over_tokens_shows_its_bytes(page: Any, demo: Server) -> None:
    show(page, demo, text="a 😀 b")
    boxes = page.locator(".pr-tokens .pr-token").all_inner_texts()
    split = [box for box in boxes if box.startswith("⟨")]
    assert "".join(split).replace("⟨", "").replace("⟩", "") in ("F09F9880", "20F09F9880")
    page.get_by_text("Tokens as a table").click()
    rows = page.get_by_role("region", name="Table of tokens").locator("tbody tr")
    playwright.expect(rows).to_have_count(len(boxes))
    body = {"prompt": "a 😀 b"}
    url = f"{demo.base_url}/tokenize"
    ids = httpx2.post(url, json=body).json()["tokens"]
    shown = [int(row.locator("td").first.inner_text()) for row in rows.all()]
    assert shown == ids


def test_prompt_page_keyboard_reads_tokens_out(page: Any, demo: Server) -> None:
    show(page, demo, messages=json.dumps(CHAT))
    tokens = page.locator(".pr-tokens")
    tokens.focus()
    count = page.locator(".pr-tokens .pr-token").count()
    for key, place in (("End", count), ("ArrowLeft", count - 1), ("Home", 1), ("ArrowRight", 2)):
        page.keyboard.press(key)
        playwright.expect(tokens).to_have_attribute("aria-valuenow", str(place))
        assert f"token {place} of {count}" in tokens.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowDown")
    playwright.expect(tokens).not_to_have_attribute("aria-valuenow", "2")


def test_prompt_page_edit_tells_what_it_loses(page: Any, demo: Server) -> None:
    send(demo, CHAT)
    show(page, demo, messages=json.dumps(CHAT))
    before = number_of(page, ".pr-cached-count")
    assert before >= 64
    system = page.get_by_label("Content of message 1")
    system.fill("X" + LONG)
    page.wait_for_selector(".pr-loss")
    after = number_of(page, ".pr-cached-count")
    assert number_of(page, ".pr-loss b") == before - after
    said = "Block 0 is the first that differs: it holds the system message. Lost: "
    whole = before // 64 * 64
    playwright.expect(page.locator(".pr-loss")).to_contain_text(f"{said}{whole} tokens")
    page.get_by_role("button", name="Compare with this version").click()
    playwright.expect(page.locator(".pr-loss")).to_have_count(0)
    system.fill(LONG)
    wait_for_tokens(page, LONG[:30])
    page.wait_for_function(
        "count => document.querySelector('.pr-cached-count').textContent === count",
        arg=str(before),
    )


def test_prompt_page_compares_with_the_prompt_of_an_answer(page: Any, demo: Server) -> None:
    body = {"input": CHAT, "max_output_tokens": 1}
    answer = httpx2.post(f"{demo.base_url}/v1/responses", json=body, timeout=60).json()
    show(page, demo, messages=json.dumps(CHAT))
    page.get_by_label("Compare with the prompt of the answer").fill(answer["id"])
    said = page.locator(".pr-compared [role=status]")
    playwright.expect(said).to_have_text("It can use every whole block of that prompt.")
    page.get_by_label("Content of message 1").fill(LONG.replace("three", "four"))
    playwright.expect(said).to_contain_text("it holds the system message")
    page.get_by_label("Compare with the prompt of the answer").fill("resp_none")
    playwright.expect(said).to_have_text("The server does not remember this answer.")


def test_prompt_page_messages_are_added_removed_and_kept_in_the_address(
    page: Any, demo: Server
) -> None:
    show(page, demo, messages=json.dumps(CHAT[1:]))
    page.get_by_role("button", name="Add assistant message").click()
    page.get_by_label("Content of message 2").fill("Hi.")
    wait_for_tokens(page, "Hi")
    page.get_by_label("Remove message 1").click()
    page.wait_for_function(
        "() => location.hash.includes('Hi.') && !location.hash.includes('Hello')"
    )
    page.reload()
    playwright.expect(page.get_by_label("Content of message 1")).to_have_value("Hi.")
    playwright.expect(page.get_by_label("Role of message 1")).to_have_value("assistant")


def test_prompt_page_keeps_what_the_address_got_while_it_waited(page: Any, demo: Server) -> None:
    show(page, demo, text="one")
    page.get_by_label("Text").fill("two")
    page.evaluate("location.hash += '&drawer=inspector&answer=none'")
    page.wait_for_function("() => location.hash.includes('two')")
    assert "drawer=inspector" in page.url
    page.get_by_label("Text").fill("three")
    page.keyboard.press("Escape")
    page.wait_for_function("() => location.hash.includes('three')")
    assert "drawer" not in page.url


def test_prompt_page_lints_in_plain_words(page: Any, demo: Server) -> None:
    odd = [{"role": "user", "content": "Ignore this. <|im_end|>"}]
    show(page, demo, messages=json.dumps(odd))
    codes = {item.get_attribute("data-code") for item in page.locator(".pr-lint li").all()}
    assert codes == {"special_token_in_content", "no_system_message"}
    assert "control token" in page.locator("[data-code=special_token_in_content]").inner_text()
    page.get_by_label("Content of message 1").fill("Fine")
    page.get_by_role("button", name="Add system message").click()
    playwright.expect(page.locator(".pr-lint")).to_have_count(0)


def test_prompt_page_warns_of_a_prompt_beyond_the_context(page: Any) -> None:
    with serving("demo", "--max-model-len", 1024) as short:
        show(page, short, text="Once")
        page.get_by_label("Text").fill("word " * 1100)
        warning = page.locator("[data-code=context_length_exceeded]")
        playwright.expect(warning).to_contain_text("the context has 1024")


def test_prompt_page_shows_the_servers_refusal(page: Any, demo: Server) -> None:
    odd = [{"role": "banana", "content": "x"}]
    page.goto(f"{demo.base_url}/ui/#/prompt?messages={quote(json.dumps(odd))}")
    playwright.expect(page.get_by_role("alert")).to_contain_text("role")
    page.get_by_label("Role of message 1").select_option("user")
    playwright.expect(page.get_by_role("alert")).to_have_count(0)
