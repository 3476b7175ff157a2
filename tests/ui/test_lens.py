"""The Lens page in a real browser: its tables against transformers, and its canvases."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import httpx2
import pytest

import engine.demo
from tests.support.serve import Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
transformers = pytest.importorskip("transformers", reason="needs transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ui
UI = {"x-penstock-ui": "1"}
DEMO = Path(engine.demo.__file__).parent
TEXT = "I want to move to a house by the river"
SOURCE, TARGET = "Dan loves icecream", "Dan älskar glass"
VIEWS = [("dark", 1280), ("light", 375)]
TABS = ["predictions", "attention", "logit", "residual", "embeddings"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def translate() -> Iterator[Server]:
    with serving("demo-translate", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as runner:
        opened = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=VIEWS, ids=str)
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty tab. Errors of scripts fail the test."""
    scheme, width = request.param
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield tab
    assert not [error for error in errors if not error.startswith("Failed to load resource")]
    tab.close()


one_view = pytest.mark.parametrize("page", VIEWS[:1], indirect=True, ids=str)


def show(page: Any, server: Server, tab: str, **params: Any) -> None:
    given = {"text": TEXT, "tab": tab, **params}
    page.goto(f"{server.base_url}/ui/#/lens?{urlencode(given)}")
    page.wait_for_selector("#lens-panel")


def parameters(page: Any) -> dict[str, str]:
    """The parameters of the address."""
    query = page.evaluate("location.hash").partition("?")[2]
    return {name: values[0] for name, values in parse_qs(query).items()}


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


@torch.inference_mode()
def looked_at(model: Any, inputs: dict[str, Any]) -> Any:
    found = model(**inputs, output_attentions=True, output_hidden_states=True)
    found.model, found.inputs = model, inputs
    return found


def figure(text: str) -> float:
    return float(text.replace("−", "-"))


def rows_of(page: Any, selector: str) -> list[list[str]]:
    """The texts of the cells of a table's body."""
    rows: list[list[str]] = page.eval_on_selector_all(
        f"{selector} tbody tr", "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
    )
    return rows


def test_predictions_are_those_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    show(page, demo, "predictions")
    page.wait_for_selector("#lens-predictions")
    ids, probabilities = (
        [
            [cell.get_attribute(name) for cell in row.query_selector_all("td")]
            for row in page.query_selector_all("#lens-predictions tbody tr")[:10]
        ]
        for name in ("data-id", "data-p")
    )
    expected = reference.logits[0].softmax(-1)
    best = expected.topk(10).values
    texts = rows_of(page, "#lens-predictions")
    for position in range(len(expected)):
        for rank in range(10):
            shown = float(probabilities[rank][position])
            assert shown == pytest.approx(float(best[position, rank]), abs=1e-4)
            token = int(ids[rank][position])
            assert shown == pytest.approx(float(expected[position, token]), abs=1e-4)
            share = float(re.search(r"([\d.]+) %$", texts[rank][position + 1])[1])  # type: ignore[index]
            assert share / 100 == pytest.approx(shown, abs=6e-4)
        entropy = torch.distributions.Categorical(probs=expected[position]).entropy()
        assert figure(texts[10][position + 1]) == pytest.approx(
            float(entropy) / math.log(2), abs=1e-3
        )


def check_rows(page: Any, weights: Any, rows: list[int]) -> None:
    """Compare the table of some rows of the open head with weights [queries, keys]."""
    canvas = page.get_by_role("slider", name=re.compile("Attention of"))
    for row in rows:
        canvas.focus()
        for _ in range(weights.shape[0]):
            canvas.press("ArrowUp")
        for _ in range(row):
            canvas.press("ArrowDown")
        canvas.press("Enter")
        assert parameters(page)["row"] == str(row)
        title = page.locator(".lens-query h3")
        playwright.expect(title).to_contain_text(f"({row})")
        page.get_by_text("Weights as a table").click()
        table = page.get_by_role("region", name="Weights of the row").locator("tr")
        seen = page.locator(".lens-query .lens-strip span").count()
        playwright.expect(table).to_have_count(seen + 1)
        shown = [figure(cells[-1]) for cells in rows_of(page, ".lens-query table")]
        assert shown == pytest.approx(weights[row, :seen].tolist(), abs=1e-4)
        assert not weights[row, seen:].any()
        page.get_by_text("Weights as a table").click()
        page.get_by_role("button", name="Unpin").click()


def test_attention_is_that_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    for layer, head in ((0, 0), (2, 5)):
        show(page, demo, "attention", layer=layer, head=head)
        check_rows(page, reference.attentions[layer][0, head], [0, 4, 10])


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
    page.wait_for_selector("#lens-logit")
    model = reference.model
    rows = page.query_selector_all("#lens-logit tbody tr")
    *earlier, _ = reference.hidden_states
    with torch.inference_mode():
        logits = [model.lm_head(model.model.norm(state))[0] for state in earlier]
    logits.append(reference.logits[0])
    assert len(rows) == len(logits)
    for row, expected in zip(rows, logits, strict=True):
        cells = row.query_selector_all("td")
        assert len(cells) == len(expected)
        for cell, scores in zip(cells, expected, strict=True):
            probabilities = scores.softmax(-1)
            shown = float(cell.get_attribute("data-p"))
            assert shown == pytest.approx(float(probabilities.max()), abs=1e-4)
            token = int(cell.get_attribute("data-id"))
            assert shown == pytest.approx(float(probabilities[token]), abs=1e-4)
            entropy = torch.distributions.Categorical(probs=probabilities).entropy()
            shown = float(cell.get_attribute("data-entropy"))
            assert shown == pytest.approx(float(entropy) / math.log(2), abs=1e-3)


def streams_of(reference: Any) -> list[Any]:
    """The stream before each norm of the demo, [T, hidden] each."""
    model, found = reference.model.model, []
    norms = [
        norm
        for layer in model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    hooks = [
        norm.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
        for norm in [*norms, model.norm]
    ]
    with torch.inference_mode():
        reference.model(**reference.inputs)
    for hook in hooks:
        hook.remove()
    return found


@one_view
@pytest.mark.parametrize("choice", [{}, {"first": "0"}, {"token": "3"}], ids=str)
def test_residual_stream_is_that_of_transformers(
    page: Any, demo: Server, reference: Any, choice: dict[str, str]
) -> None:
    show(page, demo, "residual", **choice)
    page.get_by_text("Update scale as a table").click()
    page.get_by_text("RMS of the stream as a table").click()
    page.wait_for_selector("#lens-norms")
    tokens = slice(3, 4) if "token" in choice else slice(1 if "first" in choice else 0, None)
    streams = [stream[tokens] for stream in streams_of(reference)]
    norms = rows_of(page, "#lens-norms")
    assert len(norms) == len(streams) == 9
    for (_, before, _), stream in zip(norms, streams, strict=True):
        assert figure(before) == pytest.approx(float(stream.square().mean().sqrt()), rel=1e-4)
    after = reference.hidden_states[-1][0][tokens]
    assert figure(norms[-1][2]) == pytest.approx(float(after.square().mean().sqrt()), rel=1e-4)
    updates = rows_of(page, "#lens-updates")
    kinds = [[str(layer), kind] for layer in range(4) for kind in ("attention", "mlp")]
    assert [row[:2] for row in updates] == kinds
    for at, (*_, shown) in enumerate(updates):
        added = streams[at + 1] - streams[at]
        ratio = float(streams[at].std() / added.std())
        assert figure(shown) == pytest.approx(1 / math.sqrt(1 + ratio**2), abs=1e-4)


@one_view
def test_embeddings_are_those_of_transformers(page: Any, demo: Server, reference: Any) -> None:
    show(page, demo, "embeddings", words=" river house")
    page.get_by_text("Cosines as a table").click()
    page.wait_for_selector("#lens-cosines")
    rows = page.query_selector_all("#lens-cosines tbody tr")
    ids = [int(row.get_attribute("data-id")) for row in rows]
    assert len(ids) == 2
    table = reference.model.get_input_embeddings().weight[ids]
    expected = torch.nn.functional.cosine_similarity(table[:, None], table[None], dim=-1)
    shown = [[figure(text) for text in row[1:]] for row in rows_of(page, "#lens-cosines")]
    for ours, theirs in zip(shown, expected.tolist(), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


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
    show(page, demo, "attention")
    thumbs = page.get_by_role("slider", name="Head", exact=True)
    thumbs.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        thumbs.press(key)
    page.wait_for_selector('h2:has-text("L1 H2")')
    assert thumbs.get_attribute("aria-valuetext").startswith("layer 1, head 2, flatness ")
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
    answer = {"id": "mine", "prompt": prompt, "tokens": tokens}
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
    with_answers(page, [50] * 100, [60] * 200)
    page.goto(f"{demo.base_url}/ui/#/lens?answer=mine")
    page.wait_for_selector("#lens-predictions")
    assert page.locator("#lens-predictions thead th").count() == 256
    playwright.expect(page.locator(".lens-tokens")).to_contain_text("The last 44 tokens")


@one_view
def test_text_that_is_too_long_says_the_limit(page: Any, demo: Server) -> None:
    page.goto(f"{demo.base_url}/ui/#/lens?{urlencode({'text': 'river ' * 400})}")
    playwright.expect(page.get_by_role("alert")).to_contain_text("at most 256")
