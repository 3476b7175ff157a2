"""The Model page in a real browser: boxes, shapes and parameters of the model that is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import playwright.sync_api as playwright
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from tests.support.serve import Server, serving
from tests.support.tiny_bert import tiny_bert
from tests.ui.checks.model import check_parameters, sizes_of
from tests.ui.pages import tab

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--max-num-seqs", "8") as server:
        yield server


def show(page: Any, server: Server, **params: str) -> None:
    query = "&".join(f"{name}={value}" for name, value in params.items())
    page.goto(f"{server.base_url}/ui/#/model?{query}")
    page.wait_for_selector(".md-flow", timeout=60_000)


def parameters_of(page: Any, selector: str) -> list[int]:
    boxes = page.locator(selector).all()
    return [int(box.get_attribute("data-parameters")) for box in boxes]


def roots(page: Any) -> str:
    """Return a selector of the outermost boxes."""
    return ".md-columns > section > .md-flow > div > .md-box"


def test_model_page_parameters_sum_to_the_models(page: Any, demo: Server) -> None:
    show(page, demo)
    check_parameters(page, model_folder("demo"))
    assert sum(parameters_of(page, roots(page))) == sum(sizes_of(model_folder("demo")).values())
    assert page.locator(".md-times").all_inner_texts() == ["× 4"]


def test_model_page_shapes_follow_the_prompt(page: Any, demo: Server) -> None:
    show(page, demo, t="7")
    up = page.locator('[data-name="blocks.0.mlp.up"] .md-shape')
    assert up.inner_text() == "7 × 1024"
    attend = page.locator('[data-name="blocks.0.attention.attend"] .md-facts')
    assert "scores 8 × 7 × 7" in attend.inner_text()
    field = page.get_by_label("Shapes for a prompt of")
    field.fill("90")
    field.press("Enter")
    playwright.expect(up).to_have_text("90 × 1024")
    assert "t=90" in page.url


def test_model_page_box_leads_to_its_lens(page: Any, demo: Server) -> None:
    show(page, demo)
    link = page.locator('[data-name="blocks.0.attention"] > .md-head a')
    assert link.get_attribute("href") == "#/lens?tab=attention"


def test_model_page_lines_go_around_attention_and_mlp(page: Any, demo: Server) -> None:
    """In a pre-norm block, each addition reads what came before the norm."""
    show(page, demo)
    block = page.locator('[data-name="blocks.0"] > .md-flow')
    skips = block.locator(":scope > .md-skip")
    rows = "line => [getComputedStyle(line).gridRowStart, getComputedStyle(line).gridRowEnd]"
    spans = {tuple(line.evaluate(rows)) for line in skips.all()}
    # Rows: attention_norm, attention, +, mlp_norm, mlp, +.
    assert spans == {("1", "4"), ("4", "7")}


def test_model_page_shows_wavelengths_memory_and_settings(page: Any, demo: Server) -> None:
    show(page, demo)
    # The scaling multiplies wavelengths above 1,024 by 16, like the context: the same pairs turn.
    expected = sum(6.2831853 * 10000 ** (pair / 16) <= 1024 for pair in range(16))
    caption = page.locator(".md-chart figcaption").first.inner_text()
    assert f"{expected} of 16 pairs" in caption
    assert page.locator(".md-chart circle.md-inside").count() == expected
    rows = page.get_by_role("region", name="Memory").locator("tbody th").all_inner_texts()
    assert {"weights", "KV cache", "in all"} <= set(rows)
    settings = page.get_by_role("region", name="Settings").locator("tbody tr").all_inner_texts()
    assert any(re.match(r"--max-num-seqs\s+8\s+128", row) for row in settings)


def test_model_page_of_an_encoder_decoder_has_two_columns(browser: Any) -> None:
    with serving("demo-translate") as server, tab(browser) as page:
        show(page, server)
        titles = page.locator(".md-columns h3").all_inner_texts()
        assert titles == ["Encoder", "Decoder"]
        assert page.locator(".md-times").all_inner_texts() == ["× 3", "× 3"]
        count = httpx2.get(f"{server.base_url}/v1/models").json()["data"][0]["parameters"]
        assert sum(parameters_of(page, roots(page))) == count
        kv = page.locator('[data-name="decoder.0.cross.kv"] .md-facts')
        assert "reads encoder_norm of the encoder" in kv.inner_text()


def test_model_page_of_an_encoder_norms_after_the_addition(browser: Any, tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    with serving(str(folder)) as server, tab(browser) as page:
        show(page, server)
        block = page.locator('[data-name="blocks.0"] > .md-flow')
        names = block.locator(":scope > div > .md-box > .md-head a").all_inner_texts()
        assert names == ["qkv", "attend", "out", "attention_norm", "mlp", "mlp_norm"]
        assert page.locator(".md-times").all_inner_texts() == ["× 2"]
