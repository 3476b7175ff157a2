"""The tab State of the Lens page in a real browser, for models with recurrent layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import playwright.sync_api as playwright
import pytest

import engine.demo
from tests.support.serve import Server, serving
from tests.ui.checks.lens import figure, parameters, rows_of
from tests.ui.pages import SIZES

transformers = pytest.importorskip("transformers", reason="needs transformers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ui
UI = {"x-penstock-ui": "1"}
DEMO = Path(engine.demo.__file__).parent / "model"
TEXT = "I want to move to a house by the river"
one_view = pytest.mark.parametrize("page", SIZES[:1], indirect=True, ids=str)


def hybrid() -> Any:
    from tests.engine.models.test_granite_hybrid import config

    return config()


def convolutions() -> Any:
    from tests.engine.models.test_lfm2 import config

    return config()


def write(config: Any, folder: Path) -> Any:
    """Write a model with random weights and the demo's tokenizer, and return it."""
    config.vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return model


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    """A model whose layer 2 of 4 attends, and the reference."""
    folder = tmp_path_factory.mktemp("mamba")
    reference = write(hybrid(), folder)
    with serving(str(folder), "--dtype", "float32") as server:
        yield server, reference


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with short convolutions."""
    folder = tmp_path_factory.mktemp("short")
    write(convolutions(), folder)
    with serving(str(folder), "--dtype", "float32") as server:
        yield server


def show(page: Any, server: Server, tab: str, **params: Any) -> None:
    given = {"text": TEXT, "tab": tab, **params}
    page.goto(f"{server.base_url}/ui/#/lens?{urlencode(given)}")
    page.wait_for_selector("#lens-panel")


def table(page: Any) -> list[list[str]]:
    page.get_by_text("Figures of the head as a table").click()
    page.wait_for_selector("#lens-state")
    return rows_of(page, "#lens-state")


def test_states_are_those_of_transformers(page: Any, mamba: tuple[Server, Any]) -> None:
    server, reference = mamba
    show(page, server, "state", layer=3, head=2)
    rows = table(page)
    ids = httpx2.post(f"{server.base_url}/tokenize", json={"prompt": TEXT}).json()["tokens"]
    assert [int(row[0]) for row in rows] == list(range(len(ids)))
    for end in (1, 4, len(ids)):
        with torch.inference_mode():
            cache = reference(torch.tensor([ids[:end]]), use_cache=True).past_key_values
        state = cache.layers[3].recurrent_states[0][0, 2]
        assert figure(rows[end - 1][2]) == pytest.approx(float(state.norm()), rel=0.05)


@one_view
def test_layer_figure_and_head_are_chosen_by_keys(page: Any, mamba: tuple[Server, Any]) -> None:
    show(page, mamba[0], "state")
    layers = page.get_by_role("combobox", name="Layer")
    assert layers.locator("option").all_inner_texts() == ["0", "1", "3"]
    layers.select_option("1")
    page.get_by_role("combobox", name="Map of the").select_option("decays")
    heads = page.get_by_role("slider", name="decay of heads")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        heads.press(key)
    found = parameters(page)
    assert (found["layer"], found["figure"], found["head"]) == ("1", "decays", "2")
    body = {"text": TEXT, "want": ["states"]}
    report = httpx2.post(f"{mamba[0].base_url}/ui/api/lens", json=body, headers=UI).json()
    decay = report["states"][1]["decays"][2]
    text = heads.get_attribute("aria-valuetext")
    assert figure(text.rpartition(" ")[2]) == pytest.approx(decay[-1], rel=1e-3)
    gates = page.get_by_role("slider", name="Gates of H2")
    gates.press("ArrowLeft")
    shown = gates.get_attribute("aria-valuetext").rpartition("decay ")[2]
    assert figure(shown) == pytest.approx(decay[-2], rel=0.05)
    assert [figure(row[4]) for row in table(page)] == pytest.approx(decay, rel=0.05)


@one_view
def test_layer_that_the_report_lacks_is_computed_when_it_is_shown(
    page: Any, mamba: tuple[Server, Any]
) -> None:
    asked = []

    def without_traces(route: Any) -> None:
        body = route.request.post_data_json
        asked.append(body.get("layers"))
        answer = route.fetch()
        report = answer.json()
        if "layers" not in body:
            for trace in report["states"]:
                trace.update(norms=None, strengths=None, decays=None)
        route.fulfill(response=answer, json=report)

    page.route("**/ui/api/lens", without_traces)
    show(page, mamba[0], "state", layer=3)
    page.get_by_role("slider", name="Gates of H0").wait_for()
    assert asked == [None, [3]]


@one_view
def test_attention_of_a_hybrid_names_the_layers_of_the_model(
    page: Any, mamba: tuple[Server, Any]
) -> None:
    show(page, mamba[0], "attention", layer=2, head=1)
    page.wait_for_selector('h2:has-text("L2 H1")')
    page.get_by_role("slider", name="Attention of L2 H1").wait_for()
    playwright.expect(page.get_by_text("Layers with attention: 2.")).to_be_visible()
    thumbs = page.get_by_role("slider", name="Head", exact=True)
    assert thumbs.get_attribute("aria-valuetext").startswith("layer 2, head 1")
    thumbs.press("ArrowRight")
    assert parameters(page)["layer"] == "2"


def test_kept_inputs_of_convolutions_are_a_chart(page: Any, short: Server) -> None:
    show(page, short, "state", layer=3)
    page.get_by_role("slider", name="State", exact=True).wait_for()
    assert page.get_by_role("combobox", name="Head").count() == 0
    body = {"text": TEXT, "want": ["states"]}
    report = httpx2.post(f"{short.base_url}/ui/api/lens", json=body, headers=UI).json()
    norms = report["states"][2]["norms"][0]
    assert [figure(row[2]) for row in table(page)] == pytest.approx(norms, rel=1e-3)


@one_view
def test_model_without_recurrent_layers_has_no_tab(page: Any, demo: Server) -> None:
    show(page, demo, "state")
    page.wait_for_selector("#lens-predictions")
    assert page.get_by_role("tab", name="State").count() == 0
