"""The Lens over pictures: weights against transformers, and the colours of the heat map."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest
from PIL import Image, ImageStat

from tests.support import web
from tests.support.serve import Server
from tests.support.tiny_smolvlm import Reference, png_url
from tests.ui.checks.chat import fill_options
from tests.ui.checks.pictures import attached, file_of, give, sent_with, squares
from tests.ui.screenshots import ROOT, SEEING, SIZE, take_images

pytestmark = pytest.mark.ui
# The colour of a place of a canvas, given as shares of its sides.
PIXEL = """
(canvas, [x, y]) => [...canvas.getContext("2d").getImageData(
  Math.floor(x * canvas.width), Math.floor(y * canvas.height), 1, 1).data]
"""


def place_of(row: int, column: int, tile_columns: int) -> int:
    """Return the number of the embedding of a place in tiles of 3 x 3, which come one by one."""
    tile = row // 3 * tile_columns + column // 3
    return tile * 9 + row % 3 * 3 + column % 3


def test_lens_draws_attention_over_the_picture(seeing_chat: Any, seeing_model: Path) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=4, temperature=0)
    shown = squares(15, 72, 48)  # two rows of three tiles
    give(chat, "drop", ("a.png", "image/png", file_of(shown)))
    playwright.expect(attached(chat)).to_have_count(1)
    _, answer = sent_with(chat, "What is it?")
    with chat.expect_request("**/ui/api/lens") as sent:
        answer.get_by_role("button", name="Inside the model").click()
    body = json.loads(sent.value.post_data)
    assert body["images"] == [png_url(shown)]
    reference = Reference(seeing_model)
    weights = reference.attention(body["ids"], [shown])
    chat.get_by_role("tab", name="Picture").click()
    chat.wait_for_selector(".lens-drawings canvas")
    image = [at for at, token in enumerate(body["ids"]) if token == reference.image_token]
    row = int(chat.get_by_role("combobox", name="From").input_value())
    assert row == len(body["ids"]) - 5, "the token that the answer follows"
    for layer, head in (("1", "mean"), ("0", "2")):
        chat.get_by_role("combobox", name="Layer").select_option(layer)
        chat.get_by_role("combobox", name="Head").select_option(head)
        heads = weights[int(layer), :, row]
        wanted = (heads.mean(0) if head == "mean" else heads[int(head)])[image]
        shares = chat.locator(".lens-drawings figcaption b")
        for place, part in enumerate((wanted[:54], wanted[54:])):
            share = 100 * float(part.sum())
            text = f"{share:.{2 if share < 9.95 else 1}f} %"
            playwright.expect(shares.nth(place)).to_have_text(text)
        tables = chat.get_by_text("Weights as a table")
        tables.first.click()
        cells = chat.locator(".lens-drawings figure").first.locator("tbody tr")
        playwright.expect(cells).to_have_count(6)
        table = [[float(one) for one in line.split("\t")[1:]] for line in cells.all_inner_texts()]
        for r in range(6):
            for c in range(9):
                there = float(wanted[place_of(r, c, 3)])
                assert table[r][c] == pytest.approx(there, abs=2e-5), (r, c)
        tables.first.click()


def test_lens_refuses_pictures_that_its_tokens_do_not_show(seeing: Server) -> None:
    body = {"ids": [40, 41, 42], "images": [png_url(squares(16))]}
    url = f"{seeing.base_url}/ui/api/lens"
    answer = web.post(url, json=body, headers={"X-Penstock-UI": "1"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "images"
    assert "The prompt has 0 image tokens; the images need 63." in error["message"]


def test_heat_map_is_bright_where_the_weight_is_large(seeing_chat: Any) -> None:
    chat = seeing_chat
    fill_options(chat, max_tokens=2, temperature=0)
    grey = Image.new("RGB", (72, 48), (128, 128, 128))
    give(chat, "drop", ("grey.png", "image/png", file_of(grey)))
    playwright.expect(attached(chat)).to_have_count(1)
    sent_with(chat, "What is it?")[1].get_by_role("button", name="Inside the model").click()
    chat.get_by_role("tab", name="Picture").click()
    canvas = chat.get_by_role("slider", name="Attention on image 1, tiles")
    canvas.scroll_into_view_if_needed()
    said = canvas.get_attribute("aria-valuetext")
    brightest = float(said.rpartition(": ")[2])
    largest = float(chat.locator("#lens-panel .lens-scale > span").last.inner_text())
    colours = chat.evaluate("import('/ui/lens/colours.js').then(({ SHADES }) => SHADES)")
    canvas.focus()
    for _ in range(6):
        canvas.press("ArrowUp")
    for row in range(6):
        for _ in range(9):
            canvas.press("ArrowLeft")
        for column in range(9):
            weight = float(canvas.get_attribute("aria-valuetext").rpartition(": ")[2])
            assert weight <= brightest, "it opens at the brightest cell"
            colour = canvas.evaluate(PIXEL, [(column + 0.5) / 9, (row + 0.5) / 6])
            wanted = colours[round(255 * math.sqrt(weight / largest))]
            assert colour[:3] == pytest.approx(wanted, abs=4), "a grey picture changes no colour"
            canvas.press("ArrowRight")
        canvas.press("ArrowDown")


def test_pages_with_an_image_are_pictured_in_both_themes(browser: Any, seeing_model: Path) -> None:
    folder = ROOT / "build" / "screenshots"
    take_images(os.environ.get("SEEING_MODEL", SEEING), folder, browser)
    for name in ("chat", "time", "lens", "prompt"):
        means = []
        for scheme in ("dark", "light"):
            picture = Image.open(folder / f"image-{name}-{scheme}.png").convert("RGB")
            assert picture.size == (SIZE["width"], SIZE["height"])
            means.append(ImageStat.Stat(picture).mean[0])
        assert means[0] + 60 < means[1], f"{name} has a theme"
