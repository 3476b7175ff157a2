"""The Lens page in a real browser: its tables against transformers, and its canvases."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import numpy as np
import playwright.sync_api as playwright
import pytest

import engine.demo
from tests.support.serve import Server, serving
from tests.ui.checks.lens import (
    check_embeddings,
    check_flatness,
    check_logit_lens,
    check_predictions,
    check_residual,
    check_rows,
    check_shades,
    check_thumbs,
    figure,
    looked_at,
    parameters,
)
from tests.ui.pages import SIZES

transformers = pytest.importorskip("transformers", reason="needs transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ui
UI = {"x-penstock-ui": "1"}
DEMO = Path(engine.demo.__file__).parent
TEXT = "I want to move to a house by the river"
SOURCE, TARGET = "Dan loves icecream", "Dan älskar glass"
TABS = ["predictions", "attention", "logit", "residual", "embeddings"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def translate() -> Iterator[Server]:
    with serving("demo-translate", "--dtype", "float32") as server:
        yield server


one_view = pytest.mark.parametrize("page", SIZES[:1], indirect=True, ids=str)


def show(page: Any, server: Server, tab: str, **params: Any) -> None:
    given = {"text": TEXT, "tab": tab, **params}
    page.goto(f"{server.base_url}/ui/#/lens?{urlencode(given)}")
    page.wait_for_selector("#lens-panel")


@pytest.fixture(scope="module")
def reference(demo: Server) -> Any:
    """The outputs of transformers for TEXT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO / "model", attn_implementation="eager", dtype=torch.float32
    )
    return looked_at(model, {"input_ids": torch.tensor([tokens_of(demo)])})


@pytest.fixture(scope="module")
def translation(translate: Server) -> Any:
    """The outputs of transformers for SOURCE and TARGET."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        DEMO / "translate", attn_implementation="eager", dtype=torch.float32
    )
    body = {"source": SOURCE, "text": TARGET, "want": []}
    answer = httpx2.post(f"{translate.base_url}/ui/api/lens", json=body, headers=UI).json()
    inputs = {"input_ids": [answer["source"]], "decoder_input_ids": [answer["tokens"]]}
    return looked_at(model, {name: torch.tensor(ids) for name, ids in inputs.items()})


def tokens_of(server: Server) -> list[int]:
    answer = httpx2.post(f"{server.base_url}/tokenize", json={"prompt": TEXT}).json()
    found: list[int] = answer["tokens"]
    return found


def test_predictions_are_those_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    show(page, demo, "predictions")
    check_predictions(page, reference)


def test_attention_is_that_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    for layer, head in ((0, 0), (2, 5)):
        show(page, demo, "attention", layer=layer, head=head)
        check_rows(page, reference.attentions[layer][0, head], [0, 4, 10])


@one_view
def test_shades_and_flatness_of_heads_are_those_of_transformers(
    page: Any, demo: Server, reference: Any
) -> None:
    show(page, demo, "attention", layer=1, head=3, order="index")
    check_shades(page, reference.attentions[1][0, 3])
    check_flatness(page, reference.attentions)
    check_thumbs(page, reference.attentions)


@one_view
def test_attention_of_a_translation_is_that_of_transformers(
    page: Any, translate: Server, translation: Any
) -> None:
    stacks = {
        "cross": translation.cross_attentions,
        "decoder": translation.decoder_attentions,
        "encoder": translation.encoder_attentions,
    }
    for stack, expected in stacks.items():
        for layer, head in ((0, 1), (2, 3)):
            show(
                page, translate, "attention", layer=layer, head=head, stack=stack,
                source=SOURCE, text=TARGET,
            )  # fmt: skip
            page.wait_for_selector(f'h2:has-text("L{layer} H{head}")')
            check_rows(page, expected[layer][0, head], [0, 3])


@one_view
def test_page_translates_a_source_without_a_target(page: Any, translate: Server) -> None:
    page.goto(f"{translate.base_url}/ui/#/lens")
    page.get_by_label("Source").fill(SOURCE)
    page.get_by_role("button", name="Look").click()
    page.wait_for_selector("#lens-panel")
    assert parameters(page)["source"] == SOURCE
    assert parameters(page)["text"] == TARGET
    assert page.get_by_label("Target").input_value() == TARGET


@one_view
def test_logit_lens_is_that_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    show(page, demo, "logit")
    check_logit_lens(page, reference)


@one_view
@pytest.mark.parametrize("choice", [{}, {"first": "0"}, {"token": "3"}], ids=str)
def test_residual_stream_is_that_of_transformers(
    page: Any, demo: Server, reference: Any, choice: dict[str, str]
) -> None:
    show(page, demo, "residual", **choice)
    tokens = slice(3, 4) if "token" in choice else slice(1 if "first" in choice else 0, None)
    check_residual(page, reference, tokens)


@one_view
def test_embeddings_are_those_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    show(page, demo, "embeddings", words=" river house")
    check_embeddings(page, reference)


def test_every_tab_fits_the_window_and_opens_by_keys(page: Any, demo: Server) -> None:
    show(page, demo, "predictions")
    for name in TABS:
        assert parameters(page)["tab"] == name
        playwright.expect(page.locator("#lens-panel").get_by_text("Loading")).to_have_count(0)
        for scroller in ("document.documentElement", "document.querySelector('main')"):
            width = f"{scroller}.scrollWidth - {scroller}.clientWidth"
            assert page.evaluate(width) <= 0, name
        page.locator("[role=tab][aria-selected=true]").press("ArrowRight")
    assert parameters(page)["tab"] == TABS[0]


@one_view
def test_thumbnails_choose_a_head_by_keys_and_by_clicks(page: Any, demo: Server) -> None:
    show(page, demo, "attention", order="index")
    thumbs = page.get_by_role("slider", name="Head", exact=True)
    thumbs.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        thumbs.press(key)
    page.wait_for_selector('h2:has-text("L1 H2")')
    assert thumbs.get_attribute("aria-valuetext").startswith("layer 1, head 2, ")
    box = thumbs.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + box["height"] - 10)
    page.wait_for_selector('h2:has-text("L3 H7")')
    assert (parameters(page)["layer"], parameters(page)["head"]) == ("3", "7")
    page.get_by_role("combobox", name="Heads").select_option("flat")
    assert parameters(page)["order"] == "flat"
    page.get_by_text("Flatness of all heads as a table").click()
    table = page.get_by_role("region", name="Flatness")
    playwright.expect(table.locator("tr")).to_have_count(5)
    flatness = [float(text) for text in table.locator("tr").nth(4).locator("td").all_inner_texts()]
    thumbs.focus()
    for _ in range(8):
        thumbs.press("ArrowLeft")
    assert int(parameters(page)["head"]) == flatness.index(max(flatness))


@one_view
def test_head_is_saved_as_a_picture(page: Any, demo: Server) -> None:
    show(page, demo, "attention", layer=2, head=1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as PNG").click()
    assert download.value.suggested_filename == "attention-L2-H1.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


@one_view
def test_pointer_reads_out_the_cell_and_a_gone_capture_is_made_again(
    page: Any, demo: Server, reference: Any
) -> None:
    show(page, demo, "attention", layer=0, head=0)
    canvas = page.get_by_role("slider", name=re.compile("Attention of"))
    canvas.wait_for()
    # Another lens of the same key replaces the capture.
    body = {"ids": [1, 2, 3]}
    httpx2.post(f"{demo.base_url}/ui/api/lens", json=body, headers=UI, timeout=30)
    thumbs = page.get_by_role("slider", name="Head", exact=True)
    thumbs.press("ArrowRight")
    page.wait_for_selector('h2:has-text("L0 H1")')
    canvas.wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    text = page.locator(".lens-read").first.inner_text()
    assert text.startswith("·river (10) → ·river (10): ")
    expected = float(reference.attentions[0][0, 1, 10, 10])
    assert figure(text.rpartition(": ")[2]) == pytest.approx(expected, abs=0.005)
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 40)
    assert page.locator(".lens-read").first.inner_text().endswith("not visible")


@one_view
def test_answer_that_is_not_known_says_so(page: Any, demo: Server) -> None:
    page.goto(f"{demo.base_url}/ui/#/lens?answer=unknown")
    playwright.expect(page.get_by_role("alert")).to_be_visible()


def with_answers(page: Any, prompt: list[int], tokens: list[int]) -> None:
    """Stand in for the chat's answers: "mine" is the only one."""
    answer = {"id": "mine", "prompt": prompt, "tokens": tokens, "pictures": []}
    module = f"export const answerOf = (id) => id === 'mine' ? {json.dumps(answer)} : null;"
    page.route(
        "**/chat/answers.js",
        lambda route: route.fulfill(body=module, content_type="text/javascript"),
    )


@one_view
def test_answer_of_the_chat_is_shown_with_its_prompt(page: Any, demo: Server) -> None:
    ids = tokens_of(demo)
    with_answers(page, ids[:4], ids[4:])
    page.goto(f"{demo.base_url}/ui/#/lens?answer=mine")
    page.wait_for_selector("#lens-predictions")
    heads = page.locator("#lens-predictions thead th").all_inner_texts()
    assert "".join(heads) == TEXT.replace(" ", "·")
    page.goto(f"{demo.base_url}/ui/#/lens?answer=other")
    playwright.expect(page.get_by_role("alert")).to_contain_text("not known")


@one_view
def test_answer_that_is_too_long_is_cut_and_says_so(page: Any, demo: Server) -> None:
    with_answers(page, [50] * 100, [60] * 1000)
    page.goto(f"{demo.base_url}/ui/#/lens?answer=mine")
    page.wait_for_selector("#lens-predictions")
    assert page.locator("#lens-predictions thead th").count() == 1024
    playwright.expect(page.locator(".lens-tokens")).to_contain_text("The last 76 tokens")


@one_view
def test_text_that_is_too_long_says_the_limit(page: Any, demo: Server) -> None:
    page.goto(f"{demo.base_url}/ui/#/lens?{urlencode({'text': 'river ' * 1600})}")
    playwright.expect(page.get_by_role("alert")).to_contain_text("at most 1024")


def test_answer_opens_in_view_with_edges_where_columns_are_hidden(page: Any, demo: Server) -> None:
    with_answers(page, [50 + place for place in range(80)], [200 + place for place in range(60)])
    page.goto(f"{demo.base_url}/ui/#/lens?answer=mine")
    for tab, table in (("Predictions", "lens-predictions"), ("Logit lens", "lens-logit")):
        page.get_by_role("tab", name=tab).click()
        first = page.locator(f"#{table} th.lens-answer")
        first.wait_for()
        box = page.locator(f".lens-edges:has(#{table})")
        playwright.expect(box).to_have_class(re.compile("lens-more-left.*lens-more-right"))
        inside, outside = first.bounding_box(), box.bounding_box()
        assert outside["x"] <= inside["x"] < outside["x"] + outside["width"] / 2
        assert 0 <= inside["y"] < 900
        box.locator(".lens-scroll").evaluate("box => { box.scrollLeft = 0; }")
        playwright.expect(box).not_to_have_class(re.compile("lens-more-left"))
        box.locator(".lens-scroll").evaluate("box => { box.scrollLeft = 1e6; }")
        playwright.expect(box).not_to_have_class(re.compile("lens-more-right"))
    strip = page.locator(".lens-strip .lens-answer").bounding_box()
    tokens = page.locator(".lens-tokens").bounding_box()
    assert tokens["y"] - 1 <= strip["y"] < tokens["y"] + tokens["height"]


@one_view
def test_heads_are_sorted_and_named_by_what_they_do(page: Any, demo: Server) -> None:
    text = "the old mill by the river stands still and " * 3
    show(page, demo, "attention", text=text)
    body = {"text": text, "want": ["thumbs"]}
    found = httpx2.post(f"{demo.base_url}/ui/api/lens", json=body, headers=UI, timeout=60).json()
    scores = found["attention"]["decoder"]
    names = {"previous": "previous token", "induction": "induction", "first": "first token"}
    kinds = {}
    for layer in range(scores["layers"]):
        for head in range(scores["heads"]):
            score, name = max((scores[name][layer][head], name) for name in names)
            if score >= 0.4:
                kinds.setdefault(name, []).append((score, layer, head))
    assert {"previous", "induction"} <= kinds.keys()
    page.wait_for_selector(".lens-kinds")
    for name, heads in kinds.items():
        row = page.locator(".lens-kinds > div", has_text=names[name])
        best = sorted(heads, reverse=True)[:6]
        shown = row.get_by_role("button").all_inner_texts()
        assert [text.split()[:2] for text in shown] == [
            [f"L{at}", f"H{head}"] for _, at, head in best
        ]
        _, layer, head = best[0]
        row.get_by_role("button").first.click()
        title = page.locator(f'h2:has-text("L{layer} H{head}")')
        playwright.expect(title).to_contain_text(names[name])
        thumbs = page.get_by_role("slider", name="Head", exact=True)
        playwright.expect(thumbs).to_have_attribute("aria-valuetext", re.compile(names[name]))


@one_view
def test_heads_of_the_longest_text_are_read_layer_by_layer(page: Any, demo: Server) -> None:
    with_answers(page, [50 + place % 300 for place in range(1000)], [60] * 24)
    page.goto(f"{demo.base_url}/ui/#/lens?answer=mine&tab=attention&order=index")
    canvas = page.get_by_role("slider", name=re.compile("Attention of"))
    canvas.wait_for()
    box = page.locator(".lens-edges", has=canvas)
    playwright.expect(box).to_have_class(re.compile("lens-more-right"))
    page.get_by_role("slider", name="Head", exact=True).press("ArrowDown")
    page.wait_for_selector('h2:has-text("L1 H0")')
    canvas.wait_for()
    ids = [50 + place % 300 for place in range(1000)] + [60] * 24
    answer = httpx2.post(
        f"{demo.base_url}/ui/api/lens/attention", json={"ids": ids, "layers": [1]},
        headers=UI, timeout=60,
    )  # fmt: skip
    weights = np.load(io.BytesIO(answer.content))
    assert weights.shape == (1, 8, 1024, 1024)
    place = int(canvas.get_attribute("aria-valuenow"))
    shown = figure(canvas.get_attribute("aria-valuetext").rpartition(": ")[2])
    assert shown == pytest.approx(float(weights[0, 0].ravel()[place]), abs=0.005)
