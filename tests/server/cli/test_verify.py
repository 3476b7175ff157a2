"""`penstock verify` describes differences for people; tests/e2e/test_verify.py runs the command."""

from __future__ import annotations

import dataclasses

import pytest

from server.cli import verify
from server.replay.recorded import RecordedAnswer
from server.replay.verify import ALONE, Difference, Report

RECORDED = RecordedAnswer(
    id="req_1",
    choice=1,
    created=0,
    model="m",
    fingerprint="fp",
    version="0",
    prompt_ids=[1],
    params={},
    tokens=[5, 6, 7],
    finish="stop",
)
FOUND = Difference(
    line=2, round=ALONE, index=1, expected=6, got=9, before="a", expected_text="b", got_text="c"
)


@pytest.mark.parametrize(
    ("changes", "where", "tokens"),
    [
        ({}, "alone", "expected 6 'b', got 9 'c'"),
        ({"round": 3}, "in random order 3", "expected 6 'b', got 9 'c'"),
        (
            {"round": 1, "company": (4, 5)},
            "in random order 1, with 2 others in flight",
            "expected 6 'b', got 9 'c'",
        ),
        ({"expected": None, "expected_text": ""}, "alone", "expected the end, got 9 'c'"),
    ],
)
def test_difference_is_described_with_its_place_and_company(
    capsys: pytest.CaptureFixture[str], changes: dict[str, object], where: str, tokens: str
) -> None:
    report = Report(total=3, sent=6, differences={2: dataclasses.replace(FOUND, **changes)})
    verify._print_text(report, {2: RECORDED})
    assert capsys.readouterr().out.splitlines() == [
        f"line 2 (req_1, choice 1): token 1 differs {where}",
        f"  after 'a': {tokens}",
        "2 of 3 recorded answers equal, 1 different; 6 replays",
    ]
