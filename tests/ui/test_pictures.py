"""Pictures in the pages: in chats with a model that takes images, and in prompts."""

from __future__ import annotations

import base64
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest
from PIL import Image

from tests.support.serve import Server
from tests.support.tiny_smolvlm import png_url
from tests.ui import axe
from tests.ui.checks.chat import ask, complete, fill_options
from tests.ui.checks.pictures import (
    LIMIT,
    ROUTE,
    attached,
    chat_of,
    file_of,
    give,
    sent_with,
    squares,
    urls_of,
    user,
)
from tests.ui.checks.prompt import send

pytestmark = pytest.mark.ui
# Reading a picture takes a while, as if it were large.
SLOWLY = """
() => {
  const read = window.createImageBitmap;
  window.createImageBitmap = (file) =>
    new Promise((done) => { setTimeout(done, 300); }).then(() => read(file));
}
"""
LOOKS = [(scheme, width) for scheme in ("dark", "light") for width in (1280, 375)]


def test_dropped_and_pasted_pictures_are_sent_and_shown(seeing_chat: Any, seeing: Server) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=6, temperature=0)
    encoded = seeing.metric("images_encoded")
    first, second, third = squares(1), squares(2, 30, 90), squares(3)
    give(chat, "drop", ("a.png", "image/png", file_of(first)))
    playwright.expect(attached(chat)).to_have_count(1)
    jpeg = file_of(second, "JPEG")
    give(chat, "paste", ("b.jpg", "image/jpeg", jpeg), ("c.png", "image/png", file_of(third)))
    playwright.expect(attached(chat)).to_have_count(3)
    chat.get_by_role("button", name="Remove c.png").click()
    playwright.expect(attached(chat)).to_have_count(2)
    sizes = (
        attached(chat)
        .get_by_role("img")
        .evaluate_all(
            "images => images.map((one) => [one.alt, one.naturalWidth, one.naturalHeight])"
        )
    )
    assert sizes == [["a.png", 60, 40], ["b.jpg", 30, 90]]
    [message], answer = sent_with(chat, "What is it?")
    jpeg_url = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
    assert urls_of(message) == [png_url(first), jpeg_url]
    assert message["content"][-1] == {"type": "text", "text": "What is it?"}
    playwright.expect(attached(chat)).to_have_count(0)
    shown = chat.get_by_role("list", name="Pictures").get_by_role("img")
    playwright.expect(shown).to_have_count(2)
    playwright.expect(answer.locator(".figures")).to_contain_text("tok/s")
    assert seeing.metric("images_encoded") - encoded == 2
    messages, _ = sent_with(chat, "And now?")
    assert urls_of(messages[0]) == [png_url(first), jpeg_url], "the next turn shows them again"
    assert messages[-1]["content"] == "And now?"


def test_nothing_is_lost_while_pictures_are_read(seeing_chat: Any) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=6, temperature=0)
    chat.evaluate(SLOWLY)
    first, second = squares(4), squares(5, 90, 30)
    give(chat, "drop", ("a.png", "image/png", file_of(first)))
    give(chat, "paste", ("b.png", "image/png", file_of(second)))
    box = chat.get_by_role("textbox", name="Message")
    box.fill("Both?")
    playwright.expect(chat.get_by_role("button", name="Send")).to_be_disabled()
    box.press("Enter")
    playwright.expect(box).to_have_value("Both?")
    playwright.expect(attached(chat)).to_have_count(2)
    [message], _ = sent_with(chat, "Both?")
    assert urls_of(message) == [png_url(first), png_url(second)]


def test_picked_picture_needs_no_text_and_survives_reload(seeing_chat: Any, tmp_path: Path) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=4)
    file = tmp_path / "river.png"
    file.write_bytes(file_of(squares(4)))
    chat.get_by_label("Pictures", exact=True).set_input_files([file])
    playwright.expect(attached(chat)).to_have_count(1)
    with chat.expect_request(ROUTE) as sent:
        chat.get_by_role("button", name="Send").click()
    [message] = json.loads(sent.value.post_data)["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": png_url(squares(4))}},
    ]
    complete(chat)
    chat.reload()
    playwright.expect(chat.get_by_role("list", name="Pictures").get_by_role("img")).to_be_visible()
    playwright.expect(chat.locator(".chat-name")).to_have_text("river.png")
    button = chat.get_by_role("button", name="river.png, full width")
    button.press("Enter")
    playwright.expect(button).to_have_attribute("aria-pressed", "true")


def test_only_a_picture_beyond_the_servers_limit_is_reduced(seeing_chat: Any) -> None:
    chat = seeing_chat
    noisy = Image.frombytes("RGB", (700, 500), random.Random(5).randbytes(700 * 500 * 3))
    small = squares(6)
    give(chat, "drop", ("big.png", "image/png", file_of(noisy)))
    notice = chat.get_by_role("alert")
    playwright.expect(notice).to_contain_text("big.png was reduced from 700 × 500 to ")
    playwright.expect(notice).to_contain_text("at most 0.3 MiB (--max-body-bytes)")
    playwright.expect(attached(chat)).to_contain_text(", reduced")
    fill_options(chat, max_tokens=2)
    with chat.expect_request(ROUTE) as sent:
        ask(chat, "Hi")
    assert len(sent.value.post_data_buffer) < LIMIT
    [url] = urls_of(json.loads(sent.value.post_data)["messages"][0])
    reduced = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert reduced.width < 700
    assert abs(reduced.width / reduced.height - 1.4) < 0.01
    give(chat, "drop", ("small.png", "image/png", file_of(small)))
    playwright.expect(attached(chat)).to_have_count(1)
    playwright.expect(attached(chat)).not_to_contain_text("reduced")


def test_picture_without_room_and_odd_files_are_refused(seeing_chat: Any) -> None:
    chat = seeing_chat
    rng = random.Random(7)
    chat.get_by_role("textbox", name="Message").focus()
    for number in range(8):
        noisy = Image.frombytes("RGB", (500, 400), rng.randbytes(500 * 400 * 3))
        give(chat, "drop", (f"{number}.png", "image/png", file_of(noisy)))
        notice = chat.get_by_role("alert")
        playwright.expect(notice).to_contain_text(f"{number}.png")
        if "There is no room for" in notice.inner_text():
            break
    else:
        raise AssertionError("the pictures are larger than the limit")
    give(chat, "drop", ("torn.png", "image/png", file_of(squares(8))[:60]))
    playwright.expect(notice).to_contain_text("torn.png cannot be read as a picture.")
    give(chat, "drop", ("odd.bmp", "image/bmp", file_of(squares(8), "BMP")))
    playwright.expect(notice).to_contain_text("odd.bmp is no PNG, JPEG, WebP or GIF picture.")


def test_text_model_shows_no_control_and_takes_no_picture(
    open_page: Callable[..., Any], demo: Server
) -> None:
    page = chat_of(open_page, demo)
    playwright.expect(page.get_by_role("button", name="Attach files")).to_be_visible()
    assert page.get_by_role("button", name="Attach pictures").count() == 0
    give(page, "paste", ("a.png", "image/png", file_of(squares(9))))
    playwright.expect(page.get_by_role("alert")).to_contain_text("This model takes no pictures")
    assert attached(page).count() == 0


def test_answer_to_a_picture_is_explained_with_it(seeing_chat: Any) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=8, seed=3)
    give(chat, "drop", ("a.png", "image/png", file_of(squares(10))))
    playwright.expect(attached(chat)).to_have_count(1)
    _, answer = sent_with(chat, "What is it?")
    answer.get_by_role("button", name="Why these tokens").click()
    drawer = chat.locator(".drawer")
    agrees = drawer.locator(".ins-agrees strong")
    count = drawer.locator(".ins-strip [role=option]").count
    playwright.expect(agrees).to_contain_text("replay agrees")
    assert agrees.inner_text() == f"replay agrees {count()}/{count()}"
    playwright.expect(drawer).to_contain_text("An answer to pictures cannot be forked.")


def parts_of_time(chat: Any, answer: Any) -> list[str]:
    """Open why an answer took its time; return the names of the parts."""
    answer.get_by_role("button", name="Why this time").click()
    chat.wait_for_selector(".wf-steps")
    parts: list[str] = chat.locator(".wf-legend dt").all_inner_texts()
    return parts


def test_waterfall_counts_the_encoder_of_an_answer_to_a_picture(seeing_chat: Any) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=2)
    line = chat.locator(".wf-images")
    assert "encoder" not in parts_of_time(chat, ask(chat, "Hi"))
    assert line.count() == 0
    chat.keyboard.press("Escape")
    give(chat, "drop", ("a.png", "image/png", file_of(squares(14))))
    playwright.expect(attached(chat)).to_have_count(1)
    parts = parts_of_time(chat, ask(chat, "What is it?"))
    assert parts[:3] == ["server", "queue", "encoder"]
    playwright.expect(line).to_contain_text(re.compile(r"^1 image, encoded in [\d.]+ m?s \(\d"))
    figure = chat.locator(".wf-legend dd").nth(2).inner_text()
    assert not figure.startswith("0 ms")
    assert "encode images" in chat.locator(".wf-phases").inner_text()
    chat.keyboard.press("Escape")
    parts_of_time(chat, ask(chat, "And now?"))
    playwright.expect(line).to_contain_text("1 image, found encoded in the cache; ready ")
    assert chat.locator(".wf-legend dd").nth(2).inner_text().startswith("0 ms")


def test_imported_picture_must_be_one(seeing_chat: Any, tmp_path: Path) -> None:
    chat = seeing_chat
    node = {"id": "n", "parent": "", "role": "user", "content": "Look", "order": 0}
    for url in ("https://pictures.example/a.png", "data:image/svg+xml;base64,PHN2Zy8+"):
        pictures = [{"name": "a", "url": url}]
        one = {"id": "c", "title": "t", "options": {}, "chosen": {"": "n"}, "changed": 1}
        one["nodes"] = {"n": {**node, "pictures": pictures}}
        file = tmp_path / "chats.json"
        file.write_text(json.dumps({"format": "penstock-chats", "version": 1, "chats": [one]}))
        chat.locator("input[type=file][accept*=json]").set_input_files([file])
        playwright.expect(chat.get_by_role("alert")).to_contain_text("is broken")


def prompt_page(open_page: Callable[..., Any], server: Server, **options: Any) -> Any:
    """Open the Prompt page with a picture of six tiles between two texts."""
    page = open_page(f"{server.base_url}/ui/#/prompt", **options)
    page.wait_for_selector(".pr-tokens")
    [picture] = [{"name": "a.png", "mimeType": "image/png", "buffer": file_of(squares(11, 72, 48))}]
    page.get_by_label("Pictures", exact=True).set_input_files([picture])
    page.wait_for_selector(".pr-image img")
    return page


def test_text_that_is_written_while_a_picture_is_read_is_kept(
    open_page: Callable[..., Any], seeing: Server
) -> None:
    page = open_page(f"{seeing.base_url}/ui/#/prompt")
    page.wait_for_selector(".pr-tokens")
    page.evaluate(SLOWLY)
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": file_of(squares(12))}
    page.get_by_label("Pictures", exact=True).set_input_files([picture])
    page.get_by_label("Content of message 2").fill("What is it?")
    page.wait_for_selector(".pr-image img")
    playwright.expect(page.get_by_label("Content of message 2")).to_have_value("What is it?")


def test_prompt_page_shows_an_image_as_one_block(
    open_page: Callable[..., Any], seeing: Server
) -> None:
    page = prompt_page(open_page, seeing)
    image = page.locator(".pr-image")
    playwright.expect(image).to_have_text("image 1: 63 tokens, 2 × 3 tiles and an overview")
    assert image.get_by_role("img", include_hidden=True).count() == 0, "an ornament of the text"
    assert image.locator("img").evaluate("one => one.naturalWidth") == 72
    tokens = page.locator(".pr-tokens")
    boxes = tokens.locator(".pr-token")
    place = next(i for i, box in enumerate(boxes.all()) if "image 1" in box.inner_text())
    tokens.focus()
    page.keyboard.press("Home")
    for _ in range(place):
        page.keyboard.press("ArrowRight")
    said = tokens.get_attribute("aria-valuetext")
    assert "a picture of 72 × 48 pixels" in said
    assert "of them separate its tiles" in said
    page.keyboard.press("ArrowRight")
    total = int(page.locator(".pr-count").inner_text().replace(",", ""))
    drawn = boxes.count() - 1
    after = int(tokens.get_attribute("aria-valuenow"))
    assert after == total - (drawn - place) + 1, "the next box is the token behind the image"
    assert page.locator(".pr-lint").count() == 0, "the marker of an image is no text of the user"
    page.get_by_text("Tokens as a table").click()
    row = page.get_by_role("region", name="Table of tokens").locator("tr", has_text="image 1")
    playwright.expect(row.locator("th")).to_have_text(f"{place} to {after - 2}")


def test_prompt_page_counts_cached_tokens_of_the_shown_picture(
    open_page: Callable[..., Any], seeing: Server
) -> None:
    page = prompt_page(open_page, seeing)
    page.get_by_label("Content of message 1").fill("Hi")
    page.get_by_label("Role of message 1").select_option("user")
    shown = user(squares(11, 72, 48), "What is the capital of France?")
    messages = [{"role": "user", "content": "Hi"}, shown]
    send(seeing, messages)
    usage = send(seeing, messages)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    playwright.expect(page.locator(".pr-cached-count")).to_have_text(str(cached), timeout=15_000)
    playwright.expect(page.locator(".pr-count")).to_have_text(str(usage["prompt_tokens"]))


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_pages_with_pictures_have_no_violation(
    open_page: Callable[..., Any], seeing: Server, look: tuple[str, int]
) -> None:
    try:
        axe.source()
    except OSError as error:
        pytest.skip(f"needs npm and its registry: {error}")
    scheme, width = look
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    page = chat_of(open_page, seeing, **options)
    give(page, "drop", ("a.png", "image/png", file_of(squares(12))))
    playwright.expect(attached(page)).to_have_count(1)
    answer = ask(page, "What is it?")
    give(page, "drop", ("b.png", "image/png", file_of(squares(13, 90, 30))))
    playwright.expect(attached(page)).to_have_count(1)
    assert axe.violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    answer.get_by_role("button", name="Inside the model").click()
    page.get_by_role("tab", name="Picture").click()
    page.wait_for_selector(".lens-drawings canvas")
    assert axe.violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = prompt_page(open_page, seeing, **options)
    assert axe.violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
