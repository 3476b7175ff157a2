"""The dashboard as SVG, drawn with fixed data, and the queries it sends to Prometheus."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest

from deploy.grafana.dashboard import panels
from deploy.grafana.render import STEPS, Window, legend_of, nice_top, number, render
from deploy.prometheus.api import Prometheus, Series

AT = Window(1000.0, 1900.0)


class Canned(Prometheus):
    """Returns two series for each query, or the buckets of a histogram."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        self.asked.append(query)
        times = [start + i * step for i in range(STEPS + 1)]
        if "by (le) (increase" in query:
            return [
                Series({"le": le}, [(t, count) for t in times])
                for le, count in (("1.0", 2.0), ("+Inf", 9.0), ("5.0", 7.0))
            ]
        labels: Iterator[dict[str, str]] = iter(({"instance": "a"}, {"instance": "b<&>"}))
        return [Series(label, [(t, t / 1e4) for t in times]) for label in labels]


def test_render_dashboard_draws_every_panel():
    prometheus = Canned()
    drawn = render(prometheus, AT, "8s")
    root = ElementTree.fromstring(drawn)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {panel.title for panel in panels()} <= texts
    assert "b<&>" in texts, "labels are shown and escaped"
    assert len(drawn) < 300_000
    assert not any("$" in query for query in prometheus.asked)
    assert all("[8s]" in q or "[1h]" in q for q in prometheus.asked if "rate(" in q)


def test_render_heatmap_shows_counts_between_cumulative_buckets():
    drawn = render(Canned(), AT, "8s")
    # The cumulative counts 2, 7 and 9 are 2, 5 and 2 per bucket, so the middle one is darkest.
    shades = re.findall(r'<path d="M[^"]*z" fill="(#\w+)"', drawn)
    assert len(set(shades)) == 2
    assert {"≤ 1 s", "≤ 5 s", "more"} <= set(re.findall(r">([^<>]+)</text>", drawn))


def test_render_panel_without_data_draws_a_dash():
    prometheus = Canned()
    prometheus.range = lambda *_: []  # type: ignore[method-assign]
    assert "–" in render(prometheus, AT, "8s")


def test_render_gap_in_data_breaks_the_curve():
    prometheus = Canned()
    points = [(1000.0, 1.0), (1010.0, 1.0), (1500.0, 1.0), (1510.0, 1.0)]
    prometheus.range = lambda *_: [Series({"le": "1"}, points)]  # type: ignore[method-assign]
    curves = re.findall(r'<path d="(M[^"]*)" fill="none"', render(prometheus, AT, "8s"))
    assert curves
    assert all(curve.count("M") == 2 for curve in curves)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.012, "s", "12 ms"),
        (0, "s", "0 s"),
        (75.5, "s", "75.5 s"),
        (0.256, "percentunit", "25.6 %"),
        (3400, "short", "3.4 k"),
        (2.5e8, "bytes", "250 MB"),
        (12, "reqps", "12 /s"),
        (7, "none", "7"),
    ],
)
def test_number_with_unit_is_formatted_for_readers(value, unit, shown):
    assert number(value, unit) == shown


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.7, 1), (0.012, 0.02), (3, 5), (1001, 2000)])
def test_nice_top_of_value_is_next_round_number(value, top):
    assert nice_top(value) == pytest.approx(top)


def test_legend_of_template_inserts_labels():
    series = Series({"num_gpu_blocks": "64", "block_size": "16"}, [])
    assert (
        legend_of("{{num_gpu_blocks}} blocks of {{block_size}}{{x}}", series) == "64 blocks of 16"
    )
