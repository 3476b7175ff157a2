"""Alerts and dashboard: every series that they read exists, and every alert can fire."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.dashboard import load, metric_names, panels, substitute
from tests.support.prometheus import promtool
from tests.support.wings import absent_wings

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules.yml"
RULES_TEST = PROMETHEUS / "rules_test.yml"
ALERTS = {r["alert"]: r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]}
VARIABLES = {"__rate_interval": "1m", "model_name": ".*"}
# Prometheus itself makes this series for each target.
OF_THE_SCRAPE = {"up"}


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ('sum by (le) (rate(a:b_bucket{x=~"c d"}[5m])) / on (y) d_e > 2 and f', "a:b_bucket d_e f"),
        ('histogram_quantile(0.9, sum by (m, le) (rate(q{a="{b}"}[5m]))) > 1e3', "q"),
        ("max(up == bool 0) offset 5m or vector(0)", "up"),
    ],
)
def test_metric_names_of_query_are_its_series(query, names):
    assert metric_names(query) == set(names.split())


async def test_series_of_alerts_and_dashboard_are_in_a_live_scrape(served):
    await served.chat()
    text = (await served.http.get("/metrics")).text
    there = {s.name for f in text_string_to_metric_families(text) for s in f.samples}
    wanted = {q: "a panel" for panel in panels() for q, _ in panel.queries}
    wanted |= {rule["expr"]: name for name, rule in ALERTS.items()}
    for query, where in wanted.items():
        names = metric_names(query) - OF_THE_SCRAPE
        assert names <= there or absent_wings(), f"{where} reads {names - there}: {query}"
    read = set().union(*map(metric_names, wanted))
    assert len(read) > 30, "no names were found in the queries"


async def test_series_that_alerts_match_by_label_begin_at_zero(served):
    """A series that first appears with a fault has no increase, so no alert would fire."""
    assert await served.metric("http_requests_total", status="500") == 0
    text = (await served.http.get("/metrics")).text
    for labels in ('reason="numerical"', 'code="server_overloaded"', 'status="500"'):
        assert re.search(rf"_total{{.*{labels}.*}} 0\.0", text), labels


def test_alerts_have_runbook_summary_severity_and_duration():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert headings == list(ALERTS), "one runbook section per alert, in the same order"
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"]


def test_rules_and_configuration_pass_promtool():
    for what, file in (("rules", RULES), ("config", PROMETHEUS / "prometheus.yml")):
        status, said = promtool("check", what, file)
        assert status == 0, said


def test_alerts_fire_on_their_fault_and_not_in_a_healthy_hour():
    status, said = promtool("test", "rules", RULES_TEST)
    assert status == 0, said
    cases = [
        c
        for t in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for c in t.get("alert_rule_test", ())
    ]
    for expected in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is expected}
        assert tested == ALERTS.keys()


def test_rules_test_with_silent_alerts_fails(tmp_path):
    deaf = yaml.safe_load(RULES.read_text())
    for rule in deaf["groups"][0]["rules"]:
        rule["for"] = "10h"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(deaf))
    (tmp_path / "rules_test.yml").write_text(RULES_TEST.read_text())
    status, said = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert status == 1
    assert set(re.findall(r"alertname: (\w+)", said)) == ALERTS.keys()


def test_dashboard_queries_pass_promtool(tmp_path):
    queries = [q for panel in panels() for q, _ in panel.queries]
    rules = [
        {"record": f"panel:{i}", "expr": substitute(query, VARIABLES)}
        for i, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    status, said = promtool("check", "rules", file)
    assert status == 0, said
    assert f"{len(queries)} rules found" in said


def test_dashboard_panels_have_unique_ids_places_and_model_filters():
    dashboard = load()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert max(Counter(ids).values()) == 1
    variables = {v["name"] for v in dashboard["templating"]["list"]}
    assert variables == {"datasource", "model_name"}
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels():
        cells.update(
            (x, y)
            for x in range(panel.x, panel.x + panel.width)
            for y in range(panel.y, panel.y + panel.height)
        )
        assert panel.x + panel.width <= 24
        for query, _ in panel.queries:
            # A panel that shows another model, or all models, would mislead.
            assert "$model_name" in query or "penstock:" not in query, panel.title
    assert max(cells.values()) == 1, "panels overlap"
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["description"]
            assert {t["datasource"]["uid"] for t in panel["targets"]} == {"${datasource}"}


def test_grafana_provisioning_names_the_data_source_of_compose():
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    [provider] = yaml.safe_load((folder / "dashboards" / "penstock.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
