"""Rules and dashboards: every expression can be read, every name that a rule records is recorded, every alert has its page and its test."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy_files import DASHBOARDS, DEPLOY, documents, text_of
from gateway.inference.events import SLO_FAILURES
from scheduler.errors import ErrorCode

ROOT = DEPLOY.parent
RULES = DEPLOY / "prometheus" / "rules.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
OPERATORS = DEPLOY / "k8s" / "monitoring" / "rules.yaml"
ENDS = {"completed", "accepted"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def panels(path: Path) -> list[dict[str, Any]]:
    return list(documents(path)[0]["panels"])


def expressions() -> Iterator[str]:
    """All that Prometheus is asked: by rules, dashboards and KEDA."""
    yield from (rule["expr"] for rule in rules())
    for path in DASHBOARDS:
        yield from (target["expr"] for panel in panels(path) for target in panel["targets"])
    scaled = documents(DEPLOY / "k8s" / "keda" / "scaled-object.yaml")[0]
    yield from (t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["type"] == "prometheus")


def names_in(expression: str) -> set[str]:
    """The time series that it reads. Raises ValueError where it is not PromQL."""
    promql_parser.parse(expression)
    return set(re.findall(r"(?<![\w:\"])(?:tierlane[_:][\w:]+|up)(?=[\s{)\[]|$)", expression))


def metrics() -> dict[str, str]:
    """Name -> type of every metric of the page about them."""
    rows = (line.strip("|").split("|") for line in text_of(ROOT / "docs" / "metrics.md").splitlines() if "| `" in line)
    return {cells[0].strip().strip("`"): cells[1].strip() for cells in rows}


def series() -> set[str]:
    """Every series that a scrape or a recording rule makes."""
    parts = ("_bucket", "_sum", "_count")
    made = {name + part for name, kind in metrics().items() for part in (parts if kind == "histogram" else ("",))}
    return made | RECORDED | {"up"}


def test_an_expression_that_is_none_is_found() -> None:
    """What the next tests rest on."""
    assert names_in('sum(rate(tierlane_x_total{a="tierlane_y"}[5m])) / tierlane:z:ratio') == {
        "tierlane_x_total",
        "tierlane:z:ratio",
    }
    with pytest.raises(ValueError, match=r".+"):
        names_in("sum(rate(tierlane_x_total[5m])")


def test_every_metric_that_is_named_exists() -> None:
    """A rule over a misspelt name never fires, which looks like health."""
    asked = {name for expression in expressions() for name in names_in(expression)}

    assert len(asked) > 30
    assert sorted(asked - series()) == []


def test_every_expression_can_be_read() -> None:
    """As Prometheus reads it; each asks for something, but for the budgets, which are numbers."""
    without = {expression for expression in expressions() if not names_in(expression)}

    assert len(list(expressions())) > 50
    assert all(expression.startswith("vector(") for expression in without)


def test_what_is_asked_by_a_recorded_name_is_recorded() -> None:
    """A dashboard over a misspelt rule shows nothing."""
    recorded = {name for expression in expressions() for name in names_in(expression) if ":" in name}

    assert recorded - RECORDED == set()


def test_the_outcomes_that_are_named_exist() -> None:
    """Failures by our fault are told by error codes of this version."""
    named = {
        code for e in expressions() for part in re.findall(r'outcome!?=~?"([^"]+)"', e) for code in part.split("|")
    }

    assert len(named) > 10
    assert named - {code.value for code in ErrorCode} - ENDS == set()


def test_the_page_for_on_call_counts_the_same_failures() -> None:
    """What burns the budget there is what the page tells as failed."""
    rates = [e for e in expressions() if "tierlane_requests_total{outcome=~" in e]
    named = {frozenset(part.split("|")) for e in rates for part in re.findall(r'outcome=~"([^"]+)"', e)}

    assert {code.value for code in SLO_FAILURES} in named


def test_both_kinds_of_prometheus_get_the_same_rules() -> None:
    """The operator's object has the groups of the file."""
    assert documents(OPERATORS)[0]["spec"]["groups"] == documents(RULES)[0]["groups"]


def test_every_alert_has_its_page_and_says_what_it_is() -> None:
    """The link leads to a page of the name; the page says how bad it is; no page is left over."""
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERTS)
    for name, alert in ALERTS.items():
        assert alert["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{name}.md")
        assert f"Severity: {alert['labels']['severity']}." in text_of(RUNBOOKS / f"{name}.md")
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert alert["annotations"]["summary"]


def test_links_of_runbooks_lead_somewhere() -> None:
    """Every relative link names a file."""
    wrong = []
    for page in RUNBOOKS.glob("*.md"):
        targets = re.findall(r"\]\((?!https?://)([^)#]+)", text_of(page))
        wrong += [(page.name, target) for target in targets if not (page.parent / target).is_file()]

    assert wrong == []


def test_every_alert_is_tested_both_ways() -> None:
    """rules_test.yaml sees each alert fire; what is silent in a case is an alert that can speak."""
    cases = [
        case
        for test in documents(DEPLOY / "prometheus" / "rules_test.yaml")[0]["tests"]
        for case in test["alert_rule_test"]
    ]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}

    assert fired == set(ALERTS)
    assert silent <= set(ALERTS)
    assert len(silent) > 10


def test_alertmanager_sends_every_severity_somewhere() -> None:
    """Routes name receivers that are there, and inhibitions name alerts that are there."""
    document = documents(DEPLOY / "alertmanager" / "alertmanager.yml")[0]
    receivers = {receiver["name"] for receiver in document["receivers"]}
    routes = [document["route"], *document["route"]["routes"]]
    patterns = re.findall(r'alertname =~? "([^"]+)"', yaml.safe_dump(document["inhibit_rules"], width=1000))

    assert {route["receiver"] for route in routes} <= receivers
    assert len(patterns) == 4
    for pattern in patterns:
        for part in pattern.split("|"):
            assert any(re.fullmatch(part, name) for name in ALERTS), part


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_is_whole(path: Path) -> None:
    """Panels have ids of their own, do not overlap, say what they show, and ask the data source that is chosen."""
    found = panels(path)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found]

    assert len({panel["id"] for panel in found}) == len(set(places)) == len(found) >= 6
    for panel in found:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["noValue"] == "no data"
