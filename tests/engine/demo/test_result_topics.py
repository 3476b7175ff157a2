"""The drawn results of tools: their reports quote them."""

from __future__ import annotations

import json

import pytest

from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.result_topics import (
    RESULTS,
    draw_result,
    error,
    nothing,
    number,
    record,
    sentence,
    spoken_fields,
    wrapped,
)
from engine.offline.demo_training.text import ToolResult
from engine.offline.demo_training.tool_topics import Errand, tool_material


@pytest.mark.parametrize("draw", RESULTS, ids=lambda draw: draw.__name__)
def test_report_is_one_line_of_text_without_a_call(draw: object) -> None:
    rng = MaterialDraws(3)
    for _ in range(300):
        result: ToolResult = draw(rng)  # type: ignore[operator]
        assert result.sentence
        assert result.sentence[-1] in ".!?"
        assert "\n" not in result.sentence
        assert "tool_call" not in result.sentence


def test_report_of_a_sentence_is_its_first_line() -> None:
    rng = MaterialDraws(4)
    for _ in range(300):
        content, report = sentence(rng)
        text = json.loads(content) if content.startswith('"') else content.splitlines()[0]
        assert report.rstrip(".") == text.rstrip(".")


def test_report_of_a_wrapped_sentence_quotes_it() -> None:
    rng = MaterialDraws(5)
    for _ in range(300):
        content, report = wrapped(rng)
        value = json.loads(content)
        values = value.values() if isinstance(value, dict) else [value[0]["text"]]
        assert any(report in (text, f"{text}.") for text in values)


def test_report_of_an_error_says_so_and_quotes_it() -> None:
    rng = MaterialDraws(6)
    for _ in range(300):
        content, report = error(rng)
        opening, _, text = report.partition(": ")
        assert opening == "The tool failed"
        assert json.dumps(text.rstrip("."), ensure_ascii=False)[1:-1] in content


def test_report_of_a_number_quotes_it() -> None:
    rng = MaterialDraws(7)
    for _ in range(100):
        content, report = number(rng)
        assert content in report


def test_report_of_nothing_is_always_the_same() -> None:
    rng = MaterialDraws(8)
    assert {nothing(rng).sentence for _ in range(50)} == {"The tool returned nothing."}


def test_spoken_fields_name_the_leaves_of_a_record() -> None:
    values = {"town": "Alta", "now": {"temp": -3.5, "dry": True}, "tags": ["a", 2], "end": None}
    assert spoken_fields(values) == [
        "town Alta",
        "temp -3.5",
        "dry true",
        "tags a and 2",
        "end null",
    ]


def test_report_of_a_record_quotes_at_most_six_fields() -> None:
    rng = MaterialDraws(9)
    for _ in range(300):
        content, report = record(rng)
        assert isinstance(json.loads(content), dict)
        assert report.startswith("The result: ")


def test_tool_that_returns_values_keeps_its_own_report_of_a_number() -> None:
    rng = MaterialDraws(10)
    errand = Errand("get_price", {"item": "lamp"}, "7", "The price of lamp is 7.")
    (kind,) = [kind for kind in tool_material().tools if "{noun}_of" in kind.names]
    reports = {draw_result(rng, errand, kind).report for _ in range(500)}
    assert "The price of lamp is 7." in reports
    assert not any(report.startswith("The result is ") for report in reports)
