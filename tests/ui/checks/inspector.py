"""The Inspector against a sampler in NumPy over transformers' logits."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import numpy as np
import pytest

from engine.protocol.generate import CUT_CODES
from tests.support.draws import Draw, bits
from tests.support.serve import Server

EXACT = 1e-4
CUTS = ["–", *[name.replace("_", "-") for name in CUT_CODES[1:]]]


# The chat's module is replaced by one that knows a few answers and notes what is forked.
CHAT = """
const answers = ANSWERS;
export const answerOf = (id) => answers[id] ?? null;
export const forks = (globalThis.forks = []);
export const fork = async (...given) => { forks.push(given); };
"""


class View:
    """The page with the Inspector over it. `open` shows an answer's token."""

    def __init__(self, page: Any, server: Server, answers: dict[str, Any]) -> None:
        self.page, self._server = page, server
        script = CHAT.replace("ANSWERS", json.dumps(answers))
        page.route(
            "**/ui/chat/answers.js",
            lambda route: route.fulfill(body=script, content_type="text/javascript"),
        )

    def open(self, answer: str, token: int = 0) -> None:
        address = f"{self._server.base_url}/ui/#/prompt?drawer=inspector"
        self.page.goto("about:blank")
        self.page.goto(f"{address}&answer={answer}&token={token}")
        self.page.wait_for_selector(".ins-table")


def answered(server: Server, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of the server as the chat keeps it. `body` is its request."""
    whole = {"return_token_ids": True, **body}
    response = httpx2.post(f"{server.base_url}/v1/completions", json=whole, timeout=60)
    choice = response.json()["choices"][0]
    params = {key: value for key, value in body.items() if key not in ("prompt", "max_tokens")}
    return {
        "id": name,
        "prompt": choice["prompt_token_ids"],
        "tokens": choice["token_ids"],
        "params": params,
        "pictures": [],
        "text": choice["text"],
    }


COLUMNS = ["token", "logit", "raw", "penal.", "T", "cut", "final", "luck", "p/luck", "won"]


def rows_of(page: Any) -> list[list[str]]:
    """Return token id and the exact figures of each candidate, with all of them shown."""
    more = page.get_by_role("button", name="more")
    if more.count():
        more.click()
    found: list[list[str]] = page.evaluate(
        """(order) => {
            const heads = [...document.querySelectorAll(".ins-table thead th")];
            const names = heads.map((head) => head.innerText.trim().replace(/^T=.*/, "T"));
            const rows = [...document.querySelectorAll(".ins-table tbody tr")];
            return rows.map((row) => [row.dataset.token, ...order.map((name) => {
                const cell = row.cells[names.indexOf(name)];
                return cell.title || cell.innerText;
            })]);
        }""",
        COLUMNS,
    )
    return found


def columns_of(page: Any) -> list[str]:
    """Return the headings of the table of candidates, as it shows them."""
    heads: list[str] = page.locator(".ins-table thead th").all_inner_texts()
    return heads


def fact(page: Any, name: str) -> str:
    text: str = page.locator(f"[data-fact='{name}']").inner_text()
    return text


def near(text: str, expected: float, tolerance: float = EXACT) -> None:
    assert float(text) == pytest.approx(expected, abs=tolerance)


def check_agreement(page: Any, answer: dict[str, Any]) -> None:
    """The replay draws all tokens of the answer."""
    length = len(answer["tokens"])
    agrees = page.locator(".ins-agrees strong").inner_text()
    assert agrees == f"replay agrees {length}/{length}"


def check_token(page: Any, draw: Draw, sent: int, *, is_chosen: bool = False) -> None:
    """The facts and candidates of the token that is shown. One that was chosen was not drawn."""
    assert fact(page, "id") == str(sent)
    assert fact(page, "position") == str(draw.position)
    raw_bits = -float(np.log2(draw.raw[sent]))
    assert float(fact(page, "surprise").split()[0]) == pytest.approx(raw_bits, abs=0.01)
    above = int((draw.logits > draw.logits[sent] + 1e-3).sum())
    below = int((draw.logits >= draw.logits[sent] - 1e-3).sum())
    assert above < int(fact(page, "rank")) <= below
    raw_entropy, final_entropy = fact(page, "entropy").removesuffix(" bits").split(" → ")
    near(raw_entropy, bits(draw.raw), 0.011)
    if not draw.is_close.any():
        near(final_entropy, bits(draw.final), 0.011)
        near(fact(page, "mass").removesuffix(" %"), 100 * draw.mass, 0.06)
        assert fact(page, "kept").split()[0].replace(",", "") == str(draw.kept)
    _check_rows(rows_of(page), draw, sent, is_chosen=is_chosen)


def _check_rows(rows: list[list[str]], draw: Draw, sent: int, *, is_chosen: bool) -> None:
    assert str(sent) in [row[0] for row in rows]
    for token, _, logit, raw, adjusted, tempered, cut, final, luck, _, race in rows:
        one = int(token)
        near(logit, draw.logits[one], 0.0051)
        near(raw, draw.raw[one])
        near(adjusted, draw.adjusted[one])
        near(tempered, draw.tempered[one])
        if not draw.is_close.any():
            assert cut == CUTS[draw.cuts[one]]
            near("0" if cut != CUTS[0] else final, draw.final[one])
        if not draw.is_greedy:
            assert float(luck) == pytest.approx(draw.luck(one), rel=1e-6)
        if not is_chosen:
            assert ("won" in race or "drawn" in race) == (one == sent)
