"""Prometheus rules and Grafana dashboards: expressions are valid, their names exist, and alerts have a page and a test."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from deploy_files import DASHBOARDS, DEPLOY, documents, text_of
from gateway.inference.events import SLO_FAILURES
from gateway.metrics.definitions import METRICS
from gateway.operations.health.advice import ADVICE
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
    """The expressions of rules, dashboards and KEDA."""
    yield from (rule["expr"] for rule in rules())
    for path in DASHBOARDS:
        yield from (target["expr"] for panel in panels(path) for target in panel["targets"])
    scaled = documents(DEPLOY / "k8s" / "keda" / "scaled-object.yaml")[0]
    yield from (t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["type"] == "prometheus")


def names_in(expression: str) -> set[str]:
    """The time series that it reads. Raises ValueError if it is not PromQL."""
    promql_parser.parse(expression)
    return set(re.findall(r"(?<![\w:\"])(?:tierlane[_:][\w:]+|up)(?=[\s{)\[]|$)", expression))


def series() -> set[str]:
    """Every series that a scrape or a recording rule gives."""
    parts = ("_bucket", "_sum", "_count")
    made = {each.name + part for each in METRICS for part in (parts if each.kind == "histogram" else ("",))}
    return made | RECORDED | {"up"}


def test_every_expression_is_valid_and_its_names_exist() -> None:
    """An alert over a misspelt name never fires."""
    named = {expression: names_in(expression) for expression in expressions()}

    assert len(named) > 30
    assert sorted(set().union(*named.values()) - series()) == []
    assert [each for each, names in named.items() if not names] == []


def test_outcomes_are_error_codes_and_failures_are_those_of_the_dashboard() -> None:
    """The error budget counts the failures that the gateway counts for its own dashboard."""
    outcomes = {code for e in expressions() for p in re.findall(r'outcome!?=~?"([^"]+)"', e) for code in p.split("|")}
    rates = [e for e in expressions() if "tierlane_requests_total{outcome=~" in e]
    failures = {frozenset(part.split("|")) for e in rates for part in re.findall(r'outcome=~"([^"]+)"', e)}

    assert len(outcomes) > 10
    assert outcomes - {code.value for code in ErrorCode} - ENDS == set()
    assert {code.value for code in SLO_FAILURES} in failures


def test_every_alert_has_a_runbook() -> None:
    """Its link leads to a page with its name and severity; other pages are those of health. The operator's rules are the same."""
    assert documents(OPERATORS)[0]["spec"]["groups"] == documents(RULES)[0]["groups"]
    pages = {path.stem for path in RUNBOOKS.glob("*.md")}
    assert pages == set(ALERTS) | {advice.runbook for advice in ADVICE.values()}
    assert [name for name in pages if len(text_of(RUNBOOKS / f"{name}.md").split()) > 200] == []
    for name, alert in ALERTS.items():
        text = text_of(RUNBOOKS / f"{name}.md")
        links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
        assert alert["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{name}.md")
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert f"Severity: {alert['labels']['severity']}." in text
        assert [target for target in links if not (RUNBOOKS / target).is_file()] == []


def test_every_alert_is_tested_both_ways() -> None:
    """rules_test.yaml has a case in which each alert fires, and cases in which it does not."""
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


def test_alertmanager_names_receivers_and_alerts_that_exist() -> None:
    """In its routes and inhibitions."""
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
def test_panels_of_a_dashboard(path: Path) -> None:
    """Unique ids and places, within the width, and the data source that is selected."""
    found = panels(path)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found}

    assert len({panel["id"] for panel in found}) == len(places) == len(found) >= 6
    assert {panel["datasource"]["uid"] for panel in found} == {"${datasource}"}
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in found) <= 24
