"""A figure of a route's answer is changed on its way to the page: the page's check must notice it.

Each check also runs with the answers as they are, so that one that always fails is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import torch

from engine.checkpoint.folder import model_folder
from tests.support.draws import Draw, DrawOracle
from tests.support.serve import Server, serving
from tests.ui.checks import inspector, lens, waterfall
from tests.ui.checks.crowd import crowded_request
from tests.ui.checks.mutants import UNCHANGED, Change, Changed, add, changes, verify
from tests.ui.checks.routes import alter_bytes, alter_json
from tests.ui.checks.watcher import watching
from tests.ui.pages import tab

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.ui, pytest.mark.slow]
FOLDER = model_folder("demo")


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32", "--speculation", "off") as server:
        yield server


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with tab(browser) as opened:
        yield opened


# The Inspector. A token: id, rank, entropies, kept, mass, ok, candidates, drawn.
BODY = {"prompt": "A river", "seed": 11, "max_tokens": 24, "temperature": 1.3, "top_p": 0.9}
PENALTIES = {"presence_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 24}


@dataclass(frozen=True)
class Explained:
    answer: dict[str, Any]
    index: int  # of a token whose cuts are not close, with a kept and a cut candidate
    draw: Draw


@pytest.fixture(scope="module")
def explained(demo: Server) -> Explained:
    body = BODY | PENALTIES
    answer = inspector.answered(demo, "mine", body)
    draws = DrawOracle(FOLDER).explain(answer["prompt"], answer["tokens"], body)
    for index, draw in enumerate(draws):
        if not draw.is_close.any() and 2 <= draw.kept <= 16:
            return Explained(answer, index, draw)
    raise AssertionError("all tokens are close")


def of_token(place: int, by: float) -> Callable[[Explained], Change]:
    return lambda explained: add("tokens", explained.index, place, by=by)


def of_candidate(place: int, by: float) -> Callable[[Explained], Change]:
    return lambda explained: add("tokens", explained.index, 7, 1, place, by=by)


def another_draw(explained: Explained) -> Change:
    def change(report: Any) -> None:
        report["tokens"][0][6] = False

    return change


EXPLAIN: dict[str, Callable[[Explained], Change]] = {
    "rank": of_token(1, 5),
    "entropy": of_token(2, 0.05),
    "final entropy": of_token(3, 0.05),
    "kept": of_token(4, 1),
    "mass": of_token(5, -0.01),
    "draws that agree": another_draw,
    "logit": of_candidate(1, 0.02),
    "raw probability": of_candidate(2, 3e-4),
    "probability after penalties": of_candidate(3, 3e-4),
    "probability after temperature": of_candidate(4, 3e-4),
    "cut": of_candidate(5, 1),
    "luck": of_candidate(6, 1e-5),
}


@changes(EXPLAIN)
def test_figure_of_explain(page: Any, demo: Server, explained: Explained, name: str) -> None:
    view = inspector.View(page, demo, {"mine": explained.answer})
    change = None
    if name != UNCHANGED:
        change = Changed(EXPLAIN[name](explained))
        alter_json(page, "**/ui/api/explain", change)
    view.open("mine", explained.index)

    def check() -> None:
        inspector.check_agreement(page, explained.answer)
        sent = explained.answer["tokens"][explained.index]
        inspector.check_token(page, explained.draw, sent)

    verify(check, change)


# The waterfall.
REQUEST: dict[str, Change] = {
    "wall time": add("wall_ms", by=30),
    **{f"part {name}": add("parts", name.split()[0], by=5) for name in waterfall.PARTS},
    "ms of a step": add("steps", 40, "ms", by=0.05),
    "begin of a step": add("steps", 40, "at", by=0.5),
    "number of a step": add("steps", 40, "n", by=1),
    "own of a step": add("steps", 40, "own", by=0.1),
    "base of a step": add("steps", 40, "base", by=0.1),
    "decodes of a step": add("steps", 40, "decode", by=1),
    "base of the fit": add("fit", "base_ms", by=0.3),
    "prefill of the fit": add("fit", "prefill_us_per_token", by=50),
    "cost of a neighbour": add("who", 0, 1, by=5),
    "prompt of a neighbour": add("who", 0, 2, by=1),
    "decodes of a neighbour": add("who", 1, 4, by=1),
}


@pytest.fixture(scope="module")
def crowded(demo: Server) -> tuple[str, waterfall.Measured]:
    with watching(demo) as watcher:
        return crowded_request(demo, watcher, "crowded")


@changes(REQUEST)
def test_figure_of_a_request(
    page: Any, demo: Server, crowded: tuple[str, waterfall.Measured], name: str
) -> None:
    request, measured = crowded
    change = None
    if name != UNCHANGED:
        change = Changed(REQUEST[name])
        alter_json(page, f"**/ui/api/requests/{request}", change)
    page.goto(f"{demo.base_url}/ui/#/prompt?drawer=waterfall&request={request}")
    page.wait_for_selector(".wf-steps")
    verify(lambda: waterfall.check_waterfall(page, measured), change)


# The lens.
TEXT = "I want to move to a house"


def of_logits(change: Change) -> Change:
    """The page asks for the logit lens by a request of its own."""

    def of_all(report: Any) -> None:
        if "logit" in report:
            change(report)

    return of_all


LENS_MUTANTS: dict[str, tuple[str, Change]] = {
    "prediction": ("predictions", add("predictions", 3, "top", 1, 1, by=2e-3)),
    "entropy of a prediction": ("predictions", add("predictions", 3, "entropy", by=0.01)),
    "logit lens": ("logit", of_logits(add("logit", 9, 3, 0, 1, by=2e-3))),
    "entropy of the logit lens": ("logit", of_logits(add("logit", 9, 2, by=0.01))),
    "update scale": ("residual", add("residual", 0, "updates", 3, "scale", by=5e-4)),
    "norm": ("residual", add("residual", 0, "norms", 3, "before", 0, by=0.5)),
    "flatness": ("flatness", add("attention", "decoder", "flatness", 1, 3, by=2e-3)),
}


def alter_thumbs(report: Any) -> None:
    thumbs = report["attention"]["decoder"]["thumbs"]
    report["attention"]["decoder"]["thumbs"] = "/" * 8 + thumbs[8:]


LENS_MUTANTS["thumbnail"] = ("thumbs", alter_thumbs)


@pytest.fixture(scope="module")
def reference(demo: Server) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = load(FOLDER, attn_implementation="eager", dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return lens.looked_at(loaded, {"input_ids": torch.tensor([tokenizer.encode(TEXT).ids])})


LENS_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "predictions": lens.check_predictions,
    "logit": lens.check_logit_lens,
    "residual": lens.check_residual,
    "flatness": lambda page, found: lens.check_flatness(page, found.attentions),
    "thumbs": lambda page, found: lens.check_thumbs(page, found.attentions),
    "shades": lambda page, found: lens.check_shades(page, found.attentions[1][0, 3]),
    "row": lambda page, found: lens.check_rows(page, found.attentions[1][0, 3], [2, 6]),
    "embeddings": lens.check_embeddings,
}


def open_lens(page: Any, demo: Server, kind: str) -> None:
    name = kind if kind in ("predictions", "logit", "residual", "embeddings") else "attention"
    text = TEXT.replace(" ", "%20")
    view = f"text={text}&tab={name}&layer=1&head=3&order=index&words=%20river%20house"
    page.goto(f"{demo.base_url}/ui/#/lens?{view}")
    page.wait_for_selector("#lens-panel")
    if name == "attention":
        page.wait_for_selector("h2:has-text('L1 H3')")


@pytest.mark.parametrize("kind", LENS_CHECKS)
def test_lens_as_it_is(page: Any, demo: Server, reference: Any, kind: str) -> None:
    open_lens(page, demo, kind)
    LENS_CHECKS[kind](page, reference)


def verify_lens(page: Any, demo: Server, reference: Any, kind: str, change: Changed) -> None:
    open_lens(page, demo, kind)
    verify(lambda: LENS_CHECKS[kind](page, reference), change)


@pytest.mark.parametrize("name", LENS_MUTANTS)
def test_figure_of_a_lens(page: Any, demo: Server, reference: Any, name: str) -> None:
    kind, made = LENS_MUTANTS[name]
    change = Changed(made)
    alter_json(page, "**/ui/api/lens", change)
    verify_lens(page, demo, reference, kind, change)


def test_byte_of_a_head(page: Any, demo: Server, reference: Any) -> None:
    def brighten(body: bytearray) -> None:
        length = len(reference.logits[0])
        place = 4 * length + 2
        body[place] = body[place] + 3 if body[place] < 128 else body[place] - 3

    change = Changed(brighten)
    alter_bytes(page, "**/ui/api/lens/*/1/3?stack=decoder", change)
    verify_lens(page, demo, reference, "shades", change)


def test_weight_of_a_row(page: Any, demo: Server, reference: Any) -> None:
    change = Changed(add("weights", 1, by=5e-4))
    alter_json(page, "**/ui/api/lens/*/1/3?*row=*", change)
    verify_lens(page, demo, reference, "row", change)


def test_cosine_of_embeddings(page: Any, demo: Server, reference: Any) -> None:
    change = Changed(add("cosine", 0, 1, by=5e-4))
    alter_json(page, "**/ui/api/lens/embeddings", change)
    verify_lens(page, demo, reference, "embeddings", change)
