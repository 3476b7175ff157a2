"""The page Compare shows the file of `penstock compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server

pytestmark = pytest.mark.ui


def token(kl: float, own: float, other: float, best: str) -> dict[str, Any]:
    return {"token": 5, "kl": kl, "own": own, "other": other, "best": best}


DOCUMENT = {
    "format": "penstock-comparison",
    "version": 1,
    "models": ["parent", "merge"],
    "same_tokens": True,
    "settings": {},
    "prompts": [
        {"prompt": "First question", "answers": [], "distances": []},
        {
            "prompt": "Second question",
            "answers": [
                {"text": "a b", "pieces": ["a", " b"], "tokens": [5, 6], "finish": "stop"},
                {"text": "a c", "pieces": ["a", " c"], "tokens": [5, 7], "finish": "length"},
            ],
            "distances": [
                {
                    "model": 1,
                    "writer": 0,
                    "tokens": [token(0.001, 0.9, 0.8, "a"), token(1.25, 0.6, 0.05, " c")],
                },
                {
                    "model": 1,
                    "writer": 1,
                    "tokens": [token(0.002, 0.8, 0.9, "a"), token(0.75, 0.7, 0.3, " b")],
                },
            ],
        },
    ],
}
for entry in DOCUMENT["prompts"]:  # type: ignore[attr-defined]
    for place, answer in enumerate(entry["answers"]):
        answer["parts_at"] = place or None
DOCUMENT["prompts"][0] = DOCUMENT["prompts"][1] | {"prompt": "First question"}  # type: ignore[index]


@pytest.fixture
def page(open_page: Callable[..., Any], demo: Server, tmp_path: Path) -> Any:
    file = tmp_path / "out.json"
    file.write_text(json.dumps(DOCUMENT))
    opened = open_page(f"{demo.base_url}/ui/#/compare")
    opened.get_by_label("Comparison").set_input_files(file)
    return opened


def test_tokens_are_shaded_and_read_out(page: Any) -> None:
    page.get_by_role("button", name="2. Second question").click()
    playwright.expect(page.locator(".cmp-prompt")).to_have_text("Second question")
    first, other = page.get_by_role("slider").all()
    assert first.locator("span").all_inner_texts() == ["a", " b"]
    assert [span.get_attribute("class").split()[0] for span in first.locator("span").all()] == [
        "cmp-0",
        "cmp-3",
    ]
    text = first.get_attribute("aria-valuetext")
    assert text.startswith("token 1 “·b”: 60.0 % here, 5.00 % by merge")
    assert "“·c”; distance 1.2500 bits" in text
    other.focus()
    page.keyboard.press("ArrowLeft")
    assert other.get_attribute("aria-valuetext").startswith("token 0 “a”: 80.0 % here, 90.0 %")
    assert "#/compare?prompt=1" in page.url


def test_other_file_is_refused(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for text, problem in (("{", "not JSON"), ("{}", "not written by penstock compare")):
        file.write_text(text)
        page.get_by_label("Comparison").set_input_files(file)
        playwright.expect(page.get_by_role("alert")).to_contain_text(problem)
