"""The Inspector against a sampler in NumPy over transformers' logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.draws import Draw

CUTS = ["–", "top-k", "top-p", "min-p", "ban"]


def rows_of(page: Any) -> list[list[str]]:
    """Return token id and the exact figures of each candidate, with all of them shown."""
    more = page.get_by_role("button", name="more")
    if more.count():
        more.click()
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll(".ins-table tbody tr")].map((row) => [
            row.dataset.token,
            ...[...row.cells].map((cell) => cell.title || cell.innerText),
        ])"""
    )
    return found


def fact(page: Any, name: str) -> str:
    text: str = page.locator(f"[data-fact='{name}']").inner_text()
    return text


def near(text: str, expected: float, tolerance: float = 1e-4) -> None:
    assert float(text) == pytest.approx(expected, abs=tolerance)


def check_agreement(page: Any, answer: dict[str, Any]) -> None:
    """The replay draws all tokens of the answer."""
    length = len(answer["tokens"])
    agrees = page.locator(".ins-agrees strong").inner_text()
    assert agrees == f"replay agrees {length}/{length}"


def check_token(
    page: Any, draw: Draw, sent: int, position: int | None = None, *, is_chosen: bool = False
) -> None:
    """The facts and candidates of the token that is shown. One that was chosen was not drawn."""
    assert fact(page, "id") == str(sent)
    assert fact(page, "position") == str(draw.position if position is None else position)
    raw_bits = -float(np.log2(draw.raw[sent]))
    assert float(fact(page, "surprise").split()[0]) == pytest.approx(raw_bits, abs=0.01)
    if not draw.is_close.any():
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
