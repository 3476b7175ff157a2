"""The tabs of the lens against transformers: attention, predictions, logit lens, residual."""

from __future__ import annotations

import math
import re
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import playwright.sync_api as playwright
import pytest
import torch

# A shade is a byte of the weight's square root: half a step of it, at a weight of 1.
SHADE = 1 / 255


def parameters(page: Any) -> dict[str, str]:
    """The parameters of the address."""
    query = page.evaluate("location.hash").partition("?")[2]
    return {name: values[0] for name, values in parse_qs(query).items()}


def figure(text: str) -> float:
    return float(text.replace("−", "-"))


def rows_of(page: Any, selector: str) -> list[list[str]]:
    """The texts of the cells of a table's body."""
    rows: list[list[str]] = page.eval_on_selector_all(
        f"{selector} tbody tr", "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
    )
    return rows


@torch.inference_mode()
def looked_at(model: Any, inputs: dict[str, Any]) -> Any:
    """The outputs of a transformers model, with attention and hidden states."""
    found = model(**inputs, output_attentions=True, output_hidden_states=True)
    found.model, found.inputs = model, inputs
    return found


def bits(probabilities: Any) -> float:
    entropy = torch.distributions.Categorical(probs=probabilities).entropy()
    return float(entropy) / math.log(2)


def check_predictions(page: Any, reference: Any) -> None:
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
        entropy = figure(texts[10][position + 1])
        assert entropy == pytest.approx(bits(expected[position]), abs=1e-3)


def _canvas(page: Any) -> Any:
    return page.get_by_role("slider", name=re.compile("Attention of"))


def check_rows(page: Any, weights: Any, rows: list[int]) -> None:
    """Compare the table of some rows of the open head with weights [queries, keys]."""
    canvas = _canvas(page)
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


def check_shades(page: Any, weights: Any) -> None:
    """Compare what the cursor reads out in each cell of the open head with weights [T, T]."""
    canvas = _canvas(page)
    length = len(weights)
    for _ in range(length):
        canvas.press("ArrowUp")
    for row in range(length):
        canvas.press("Home")
        for column in range(row + 1):
            place = str(row * length + column)
            playwright.expect(canvas).to_have_attribute("aria-valuenow", place)
            shown = figure(canvas.get_attribute("aria-valuetext").rpartition(": ")[2])
            assert math.sqrt(shown) == pytest.approx(math.sqrt(weights[row, column]), abs=SHADE)
            canvas.press("ArrowRight")
        canvas.press("ArrowDown")


# Cividis: matplotlib's colours at equal distances.
CIVIDIS = "00204d 00336f 39486b 575c6d 707173 8a8779 a69d75 c4b56c e4cf5b ffea46"
# The colour in the middle of each cell of each thumbnail: [layer][head][row][column].
THUMBS = """
([canvas, layers, heads, length]) => {
  const [left, top, gap] = [28, 18, 4];
  const cell = (canvas.width - left) / heads - gap;
  const context = canvas.getContext("2d");
  const range = (count) => [...Array(count).keys()];
  const middle = (place) => Math.floor((place + 0.5) * cell / length);
  return range(layers).map((layer) => range(heads).map((head) => {
    const [x, y] = [left + head * (cell + gap), top + layer * (cell + gap)];
    return range(length).map((row) => range(length).map((column) =>
      [...context.getImageData(x + middle(column), y + middle(row), 1, 1).data].slice(0, 3)));
  }));
}
"""


def _colours() -> Any:
    """The colours of 256 shades, [256, 3]."""
    stops = np.array([list(bytes.fromhex(stop)) for stop in CIVIDIS.split()])
    places = np.linspace(0, len(stops) - 1, 256)
    return np.stack([np.interp(places, range(len(stops)), part) for part in stops.T], axis=1)


def check_thumbs(page: Any, attentions: Any) -> None:
    """Compare the thumbnails' pixels with attentions [layer][0, head, T, T] of a short text."""
    canvas = page.get_by_role("slider", name="Head", exact=True).element_handle()
    _, heads, length, _ = attentions[0].shape
    pixels = page.evaluate(THUMBS, [canvas, len(attentions), heads, length])
    distances = np.abs(np.array(pixels)[..., None, :] - _colours()).sum(-1)
    expected = 255 * np.sqrt(torch.cat(list(attentions)).numpy())
    assert distances.argmin(-1) == pytest.approx(expected, abs=2)


def check_flatness(page: Any, attentions: Any) -> None:
    """Compare the flatness of every head with the entropy of attentions [layer][0, head, T, T]."""
    page.get_by_text("Flatness of all heads as a table").click()
    table = page.get_by_role("region", name="Flatness").locator("tr")
    playwright.expect(table).to_have_count(len(attentions) + 1)
    for layer, maps in enumerate(attentions):
        shown = [float(text) for text in table.nth(layer + 1).locator("td").all_inner_texts()]
        assert shown == pytest.approx([_flatness(weights) for weights in maps[0]], abs=6e-4)


def _flatness(weights: Any) -> float:
    """The mean of H / log(n) over the queries that see n > 1 keys."""
    shares = [
        bits(weights[query, : query + 1]) / math.log2(query + 1) for query in range(1, len(weights))
    ]
    return sum(shares) / len(shares)


def check_logit_lens(page: Any, reference: Any) -> None:
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
            shown = float(cell.get_attribute("data-entropy"))
            assert shown == pytest.approx(bits(probabilities), abs=1e-3)


def _streams_of(reference: Any) -> list[Any]:
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


def check_residual(page: Any, reference: Any, tokens: slice = slice(None)) -> None:
    """Compare update scales and norms of some tokens of the demo."""
    page.get_by_text("Update scale as a table").click()
    page.get_by_text("RMS of the stream as a table").click()
    page.wait_for_selector("#lens-norms")
    streams = [stream[tokens] for stream in _streams_of(reference)]
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


def check_embeddings(page: Any, reference: Any) -> None:
    """Compare the cosines of all words shown."""
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
