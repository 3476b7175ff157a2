"""The Inspector in a real browser: figures read from its tables equal those of the reference."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import playwright.sync_api as playwright
import pytest

from engine.checkpoint.folder import model_folder
from tests.support.draws import Draw, DrawOracle, random_body
from tests.support.serve import Server, serving
from tests.ui import axe
from tests.ui.checks.inspector import (
    View,
    answered,
    check_agreement,
    check_token,
    rows_of,
)
from tests.ui.pages import SIZES, tab

pytestmark = pytest.mark.ui
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_p": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "min_tokens": 20},
    "narrow": {"temperature": 1.3, "top_k": 5, "presence_penalty": 0.7},
    "floor": {"temperature": 1.1, "top_p": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
    "typical": {"temperature": 1.2, "top_n_sigma": 2.0, "typical_p": 0.6, "top_k": 50},
    "greedy": {"temperature": 0, "frequency_penalty": 0.4, "logit_bias": {"508": 4.0}},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def answers(demo: Server) -> dict[str, dict[str, Any]]:
    """Answers of the server, as the chat keeps them, by id."""
    found = {}
    for name, params in BODIES.items():
        body = {"prompt": "A river", "max_tokens": 24, "seed": random.randrange(2**53), **params}
        found[name] = answered(demo, name, body)
    return found


@pytest.fixture(scope="module")
def oracle() -> DrawOracle:
    return DrawOracle(model_folder("demo"))


@pytest.fixture(scope="module")
def draws(answers: dict[str, dict[str, Any]], oracle: DrawOracle) -> dict[str, list[Draw]]:
    return {
        name: oracle.explain(answer["prompt"], answer["tokens"], answer["params"])
        for name, answer in answers.items()
    }


@pytest.fixture(params=SIZES, ids=str)
def view(
    browser: Any, demo: Server, answers: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[View]:
    with tab(browser, request.param) as page:
        yield View(page, demo, answers)


@pytest.mark.parametrize("name", BODIES)
def test_figures_equal_the_reference(
    view: View, answers: dict[str, Any], draws: dict[str, list[Draw]], name: str
) -> None:
    answer = answers[name]
    length = len(answer["tokens"])
    for index in random.sample(range(length), min(4, length)):
        view.open(name, index)
        check_agreement(view.page, answer)
        check_token(view.page, draws[name][index], answer["tokens"][index])


@pytest.mark.slow
def test_figures_of_random_requests_equal_the_reference(
    browser: Any, demo: Server, oracle: DrawOracle
) -> None:
    rng = random.Random()
    # A browser's numbers hold 53 bits.
    bodies = [random_body(rng) | {"seed": rng.randrange(2**53)} for _ in range(20)]
    answers = {str(n): answered(demo, str(n), body) for n, body in enumerate(bodies)}
    with tab(browser) as page:
        view = View(page, demo, answers)
        for name, answer in answers.items():
            draws = oracle.explain(answer["prompt"], answer["tokens"], bodies[int(name)])
            for index in {0, len(draws) // 2, len(draws) - 1}:
                view.open(name, index)
                check_agreement(page, answer)
                check_token(page, draws[index], answer["tokens"][index])


@pytest.mark.slow
def test_figures_of_bfloat16_are_near_the_reference(browser: Any, oracle: DrawOracle) -> None:
    body = {"prompt": "A river", "seed": 7, "max_tokens": 40, "temperature": 1.0, "top_p": 1.0}
    with serving("demo", "--dtype", "bfloat16") as server, tab(browser) as page:
        answer = answered(server, "mine", body)
        view = View(page, server, {"mine": answer})
        draws = oracle.explain(answer["prompt"], answer["tokens"], body)
        errors = []
        for index, draw in enumerate(draws):
            view.open("mine", index)
            for token, _, _, raw, adjusted, tempered, *_ in rows_of(page):
                one = int(token)
                expected = (draw.raw[one], draw.adjusted[one], draw.tempered[one])
                shown = map(float, (raw, adjusted, tempered))
                errors += [abs(a - b) for a, b in zip(shown, expected, strict=True)]
    # A logit near 16 is rounded to 1/16, which changes a probability of one half by 3 %.
    assert max(errors) <= 5e-2
    assert np.quantile(errors, 0.99) <= 2e-2


def test_keyboard_moves_over_tokens_and_forks(view: View, answers: dict[str, Any]) -> None:
    tokens = answers["plain"]["tokens"]
    view.open("plain")
    strip = view.page.get_by_role("listbox")
    strip.focus()
    for key, index in (("End", len(tokens) - 1), ("ArrowLeft", len(tokens) - 2), ("Home", 0)):
        view.page.keyboard.press(key)
        playwright.expect(view.page.locator("[aria-selected=true]")).to_have_id(
            f"ins-token-{index}"
        )
        assert f"token={index}" in view.page.url
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("ArrowDown")
    chosen = view.page.locator("tr:has(input:checked)").get_attribute("data-token")
    view.page.keyboard.press("Enter")
    assert view.page.evaluate("forks") == [["plain", 1, int(chosen)]]
    playwright.expect(view.page.get_by_role("button", name="Fork here")).to_be_enabled()


def test_knobs_draw_what_the_reference_draws(
    view: View, answers: dict[str, Any], draws: dict[str, list[Draw]]
) -> None:
    """Other settings, decided in the browser: the same cuts and dice in the reference."""
    decided = 0
    for index in range(0, len(answers["plain"]["tokens"]), 4):
        view.open("plain", index)
        draw = draws["plain"][index]
        for temperature, top_p, top_k in ((0.5, 1.0, 0), (1.0, 0.7, 0), (1.5, 1.0, 8), (2, 0.3, 3)):
            for knob, value in (("temperature", temperature), ("topP", top_p), ("topK", top_k)):
                view.page.locator(f"[data-knob={knob}]").fill(str(value))
            line = view.page.locator(".ins-result").inner_text()
            expected, kept = tried(draw, temperature, top_p, top_k)
            if "not known" in line or expected is None:
                continue
            decided += 1
            assert line.startswith(f"{kept} kept;" if kept <= 32 else "more than 32 kept;")
            text = view.page.locator(f"tr[data-token='{expected}'] code")
            assert line.endswith(f"would draw: {text.first.inner_text()}")
    assert decided


def tried(draw: Draw, temperature: float, top_p: float, top_k: int) -> tuple[int | None, int]:
    """Return the token that other settings draw, unless that is close, and how many they keep."""
    weights = draw.adjusted ** (1 / temperature)
    probs = weights / weights.sum()
    order = np.argsort(-probs)[: top_k or len(probs)]
    before = np.cumsum(probs[order]) - probs[order]
    limit = top_p * probs[order].sum()
    keeps = (before < limit) | (top_p >= 1)
    if top_p < 1 and np.abs(before - limit).min() < 1e-4:
        return None, 0
    kept = order[keeps]
    scores = np.array([np.log(probs[i]) - np.log(draw.luck(i)) for i in kept])
    ranked = np.argsort(-scores)
    if len(ranked) > 1 and scores[ranked[0]] - scores[ranked[1]] < 1e-3:
        return None, 0
    return int(kept[ranked[0]]), len(kept)


def test_other_seeds_are_drawn(view: View) -> None:
    view.open("nucleus")
    view.page.get_by_role("button", name="Draw 20 other seeds").click()
    line = view.page.locator(".ins-draws").inner_text()
    assert sum(int(part.rsplit(" ", 1)[1]) for part in line.split(", ")) == 20


def test_answer_that_is_gone_says_so(browser: Any, demo: Server) -> None:
    page = browser.new_page()
    View(page, demo, {})
    page.goto(f"{demo.base_url}/ui/#/prompt?drawer=inspector&answer=gone")
    playwright.expect(page.get_by_role("alert")).to_contain_text("no longer in this browser")
    page.close()


def test_axe_finds_nothing(view: View) -> None:
    view.open("nucleus", 3)
    assert axe.violations(view.page) == []


def test_parts_are_switched_off_by_keys_and_draw_with_the_same_dice(
    view: View, demo: Server, answers: dict[str, Any]
) -> None:
    answer = answers["plain"]
    view.open("plain")
    page = view.page
    draw = page.get_by_role("button", name="Draw again")
    draw.click()
    drawn = page.locator(".ins-drawn")
    playwright.expect(drawn).to_contain_text(re.compile("tokens are the same|The same"))
    assert "nothing is off" in drawn.inner_text()
    length = len(answer["tokens"])
    same = re.compile(f"The same {length} tokens|The first {length} of {length} tokens")
    playwright.expect(drawn.get_by_role("status")).to_contain_text(same)

    first = page.locator("[data-at='0 0']")
    first.focus()
    for key in ("ArrowDown", "Enter", "ArrowUp", "ArrowRight", "ArrowRight", "Space"):
        page.keyboard.press(key)
    off = {"layers": [1], "heads": [[0, 1]]}
    playwright.expect(page.locator(".ins-try")).to_contain_text(["", "off: L1, L0 H1"])
    draw.click()
    playwright.expect(drawn).to_contain_text("off: L1, L0 H1")
    playwright.expect(drawn).not_to_contain_text("Drawing")
    body = {**answer["params"], "prompt": answer["prompt"], "off": off, "return_token_ids": True}
    body["max_tokens"] = len(answer["tokens"]) + 64
    response = httpx2.post(
        f"{demo.base_url}/ui/api/ablate", json=body, headers={"x-penstock-ui": "1"}, timeout=60
    )
    tokens = response.json()["choices"][0]["token_ids"]
    pairs = zip(tokens, answer["tokens"], strict=False)
    same = next((at for at, (new, old) in enumerate(pairs) if new != old), len(answer["tokens"]))
    playwright.expect(drawn).to_contain_text(f"The first {same} of {len(answer['tokens'])} tokens")
    text = response.json()["choices"][0]["text"].strip()[:40]
    assert text in drawn.inner_text()
    page.get_by_role("button", name="All on").click()
    playwright.expect(page.locator(".ins-try")).to_contain_text(["", "nothing is off"])
